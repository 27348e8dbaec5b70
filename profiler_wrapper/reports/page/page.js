"use strict";
/**
 * The frame: tabs and the address.
 *
 *   page.view({id, title, order, applies: data => reason or null, draw: (data, element) => void,
 *              filter: (text, element) => void})
 *       adds a tab. It is drawn when first opened. Where `applies` gives a reason, the tab is disabled and says it,
 *       as does the view, to which an address may lead.
 *       `filter` gets what the address says behind the view's name ("" for nothing), after `draw` and on every change;
 *       without it the search field of the view's first table does.
 *   page.goto(view, filter)         opens a view; the address becomes #view/filter
 *   page.link(view, filter, text)   an <a> that does so
 *   page.remember(view, filter)     changes the address of the view that is shown, without going anywhere
 */
(function () {
  const views = [];
  const opened = new Map(); // id of a view -> its panel, once drawn
  let data = null;
  let current = null;

  page.view = view => { views.push(view); };

  page.link = function (view, filter, text) {
    const link = page.text("a", text, "goto");
    link.href = address(view, filter);
    return link;
  };

  // ---- views ------------------------------------------------------------------------------------------------------

  const address = (view, filter) => "#" + view + (filter ? "/" + encodeURIComponent(filter.toWellFormed ? filter.toWellFormed() : filter) : "");

  function parsedAddress() {
    const text = window.location.hash.slice(1);
    const at = text.indexOf("/");
    const id = at < 0 ? text : text.slice(0, at);
    let filter = "";
    try {
      filter = at < 0 ? "" : decodeURIComponent(text.slice(at + 1));
    } catch { /* half an escape: no filter */ }
    return { id, filter };
  }

  page.goto = function (view, filter = "") {
    const wanted = address(view, filter);
    if (window.location.hash === wanted) show(); else window.location.hash = wanted;
  };

  /** The filter in the address, without a new entry in the history. */
  page.remember = function (view, filter) {
    if (current === view) window.history.replaceState(null, "", address(view, filter));
  };

  function reasonAgainst(view) {
    try {
      return (view.applies && view.applies(data)) || null;
    } catch (error) {
      console.error(error);
      return null; // the view itself will say so
    }
  }

  function failed(element, view, error) {
    console.error(error);
    element.replaceChildren();
    page.add(element, page.text("p", `${view.title} could not be shown: ${error && error.message ? error.message : error}`, "notice"));
    page.note(element, "The other views and the files beside this page are not affected.");
  }

  function show() {
    const { id, filter } = parsedAddress();
    const view = views.find(one => one.id === id) || views.find(one => !one.reason);
    if (!view) return;
    const isNew = !opened.has(view.id);
    for (const [other, panel] of opened) panel.hidden = other !== view.id;
    let panel = opened.get(view.id);
    if (isNew) {
      panel = page.element("div", "view");
      panel.id = "view-" + view.id;
      panel.setAttribute("role", "tabpanel");
      panel.setAttribute("aria-labelledby", "tab-" + view.id);
      document.getElementById("views").append(panel);
      opened.set(view.id, panel);
    }
    if (current !== view.id) window.scrollTo(0, 0);
    current = view.id;
    document.body.dataset.view = view.id;
    mark(view);
    try {
      if (view.reason) panel.replaceChildren(page.text("p", `${view.title}: ${view.reason}`, "notice"));
      else if (isNew) view.draw(data, panel);
      const given = view.id === id ? filter : "";
      if (!view.reason && !panel.dataset.failed && (given || !isNew)) {
        if (view.filter) view.filter(given, panel); else page.searchFirst(panel, given);
      }
    } catch (error) {
      panel.dataset.failed = "true";
      failed(panel, view, error);
    }
    window.dispatchEvent(new Event("resize")); // charts drawn while hidden
  }

  function mark(view) {
    for (const tab of document.querySelectorAll("[role=tab]")) {
      const selected = tab.id === "tab-" + view.id;
      tab.setAttribute("aria-selected", String(selected));
      tab.tabIndex = selected ? 0 : -1;
    }
  }

  function drawTabs() {
    const bar = document.getElementById("tabs");
    for (const view of views) {
      const tab = page.text("button", view.title, "tab");
      tab.type = "button";
      tab.id = "tab-" + view.id;
      tab.setAttribute("role", "tab");
      tab.setAttribute("aria-selected", "false");
      if (view.reason) {
        tab.setAttribute("aria-disabled", "true");
        tab.title = page.full(view.reason);
      }
      tab.addEventListener("click", () => { if (view.reason) explain(tab, view); else page.goto(view.id); });
      bar.append(tab);
    }
    bar.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const tabs = [...bar.querySelectorAll("[role=tab]")];
      const at = tabs.indexOf(document.activeElement);
      const next = tabs[(at + step + tabs.length) % tabs.length];
      next.focus();
      if (next.getAttribute("aria-disabled") !== "true") next.click();
      event.preventDefault();
    });
  }

  function explain(tab, view) {
    const bar = document.getElementById("tabs");
    bar.querySelectorAll(".why").forEach(old => old.remove());
    const why = page.text("div", `${view.title}: ${view.reason}`, "why");
    why.setAttribute("role", "status");
    bar.append(why);
    setTimeout(() => why.remove(), 6000);
  }

  // ---- start ------------------------------------------------------------------------------------------------------

  function drawHead() {
    const head = document.getElementById("head");
    const about = data.page;
    const line = page.element("div", "line");
    page.add(line, page.text("h1", about.title), page.element("span", "grow"));
    if (about.trace_href) {
      const link = page.text("a", "Chrome trace", "small");
      link.href = about.trace_href;
      link.title = "Open in ui.perfetto.dev or chrome://tracing: the timeline with a lane for the layers";
      page.add(line, link);
    }
    page.add(line, page.themeButton());
    const ranks = data.run && data.run.world_size > 1 ? `${about.rank} of ${data.run.world_size} (all of them: profiler-wrapper ranks)` : about.rank;
    const facts = [about.title.includes(about.machine) ? "" : about.machine, ranks, about.steps_in_words, data.complete === false ? "INCOMPLETE" : ""];
    page.add(head, line, page.text("div", facts.filter(Boolean).join(" · "), "facts"));
    const verdict = data.summary && data.summary.verdict;
    if (verdict) page.add(head, page.text("p", verdict, "verdict"));
  }

  page.start = function () {
    try {
      data = page.readData();
      drawHead();
    } catch (error) {
      console.error(error);
      const main = document.getElementById("views");
      page.add(main, page.text("p", `The data of this page cannot be read (${error.message}): is the file whole?`, "notice"));
      return;
    }
    page.setTheme(page.storedTheme());
    views.sort((a, b) => a.order - b.order);
    for (const view of views) view.reason = reasonAgainst(view);
    drawTabs();
    window.addEventListener("hashchange", show);
    show();
    document.documentElement.dataset.ready = "true";
    requestAnimationFrame(() => setTimeout(() => performance.mark("drawn"))); // for who measures how long it takes
  };
})();
