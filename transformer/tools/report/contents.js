// Links to the sections of the page, at its top.
component("report/contents", (element) => {
  const own = element.closest("section");
  const headings = [...document.querySelectorAll("section > h2")].filter((heading) => heading.parentElement !== own);
  const links = headings.map((heading, n) => {
    const section = heading.parentElement;
    section.id = `section-${n + 1}`;
    heading.id = `heading-${n + 1}`;
    section.setAttribute("aria-labelledby", heading.id);
    return make("li", {}, make("a", { href: `#${section.id}` }, heading.textContent));
  });
  element.className = "contents";
  element.append(make("nav", { "aria-label": "sections" }, make("ul", {}, ...links)));
});
