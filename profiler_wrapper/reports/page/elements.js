"use strict";
/**
 * Elements, made of text only: no name of a run is ever read as markup.
 *
 *   page.element(tag, className, ...children)
 *   page.text(tag, text, className) an element with text in it, cleaned and cut, with the whole as its tooltip
 *   page.add(element, ...children)  appends elements and texts; returns `element`
 *   page.note(element, text)        a quiet line of explanation
 *   page.section(element, title, help)   a heading; returns the <section> below it
 *   page.figure(element, {label, value, help, missing})   a number with what it means
 *   page.copyButton(text, label)    a button that copies
 *   page.segments(element, options, chosen, onChoose)   a row of buttons of which one is on: [[id, label, help]]
 */
(function () {
  page.add = function (element, ...children) {
    for (const child of children) if (child !== null && child !== undefined) element.append(child);
    return element;
  };

  page.text = function (tag, text, className) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    const shown = page.cut(text, tag === "p" || tag === "li" ? 800 : 240);
    element.textContent = shown;
    if (shown !== String(text)) element.title = page.full(text);
    return element;
  };

  page.element = function (tag, className, ...children) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    return page.add(element, ...children);
  };

  page.note = (element, text) => page.add(element, page.text("p", text, "note"));

  page.section = function (element, title, help) {
    const section = page.element("section");
    const heading = page.text("h2", title);
    if (help) heading.title = help;
    page.add(section, heading);
    element.append(section);
    return section;
  };

  page.figure = function (element, { label, value, help, missing }) {
    const figure = page.element("div", "figure");
    const shown = page.text("div", value === null || value === undefined ? page.format.unknown : value, "value");
    if (value === null || value === undefined) shown.title = missing || "not known";
    page.add(figure, page.text("div", label, "label"), shown);
    if (help) page.add(figure, page.text("div", help, "help"));
    if ((value === null || value === undefined) && missing) {
      const why = page.text("div", missing, "help clamped");
      why.title = page.full(missing);
      figure.append(why);
    }
    element.append(figure);
    return figure;
  };

  page.copy = async function (text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea"); // where the browser gives no clipboard to files
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  };

  page.copyButton = function (text, label = "Copy") {
    const button = page.text("button", label, "small");
    button.type = "button";
    button.addEventListener("click", async () => {
      await page.copy(typeof text === "function" ? text() : text);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = label; }, 1200);
    });
    return button;
  };

  page.segments = function (element, options, chosen, onChoose) {
    const group = page.element("span", "segments");
    group.setAttribute("role", "group");
    for (const [id, label, help] of options) {
      const button = page.text("button", label, "small");
      button.type = "button";
      button.dataset.id = id;
      if (help) button.title = help;
      button.setAttribute("aria-pressed", String(id === chosen));
      button.addEventListener("click", () => {
        for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
        onChoose(id);
      });
      group.append(button);
    }
    if (element) element.append(group);
    return group;
  };
})();
