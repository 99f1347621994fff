"use strict";

// The kinds of component of this page, each with the function that fills an element with data.
const kinds = new Map();

function component(kind, fill) {
  kinds.set(kind, fill);
}

function fillComponents() {
  for (const element of document.querySelectorAll("[data-component]")) {
    const data = JSON.parse(element.nextElementSibling.textContent);
    kinds.get(element.dataset.component)(element, data);
  }
}

// A new element with some properties and children; text children are text, whatever they hold.
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// The value of a colour or length of the style sheet, as it is in force here.
function styleOf(element, name) {
  return getComputedStyle(element).getPropertyValue(name).trim();
}
