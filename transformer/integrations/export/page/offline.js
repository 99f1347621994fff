// Keeps the files of this version of the site, so that the page opens without a network.
"use strict";

const CACHE = "transformer-site-VERSION";
const FILES = [];

self.addEventListener("install", (event) => {
  event.waitUntil(
    caches.open(CACHE).then((cache) => cache.addAll(FILES)).then(() => self.skipWaiting()),
  );
});

self.addEventListener("activate", (event) => {
  const old = (name) => name.startsWith("transformer-site-") && name !== CACHE;
  event.waitUntil(
    caches.keys().then((names) => Promise.all(names.filter(old).map((name) => caches.delete(name)))).then(() => clients.claim()),
  );
});

self.addEventListener("fetch", (event) => {
  event.respondWith(
    caches.open(CACHE).then((cache) => cache.match(event.request)).then((found) => found ?? fetch(event.request)),
  );
});
