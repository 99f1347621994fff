// What the theme has for the mouse alone: its labels are buttons, and Escape closes what they open.
document.addEventListener("DOMContentLoaded", () => {
  for (const label of document.querySelectorAll(".md-header__button:is([for=__drawer], [for=__search]), .md-sidebar-button")) {
    label.tabIndex = 0;
    label.role = "button";
    label.ariaLabel = label.textContent.trim() || "On this page";
    label.addEventListener("keydown", (event) => {
      if (event.key === " ") { // the theme answers to Enter
        event.preventDefault();
        label.click();
      }
    });
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    document.querySelectorAll("#__drawer, #__toc").forEach((toggle) => { toggle.checked = false; });
  }
});

// Search in pages that are opened from a disk, where browsers start no worker: a hidden frame does its work.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);

      const inner = this.frame.contentDocument;
      inner.open();
      inner.write("<body>");
      inner.close();
      this.frame.contentWindow.postMessage = (data) => this.onmessage?.({ data: structuredClone(data) });

      const script = inner.createElement("script");
      script.src = url;
      script.onerror = (event) => this.onerror?.(event);
      this.loaded = new Promise((done) => { script.onload = done; });
      inner.body.append(script);
    }

    postMessage(data) {
      const message = { data: structuredClone(data) }; // as between threads: what is sent is a copy
      this.loaded.then(() => this.frame.contentWindow.onmessage(message));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
