"use strict";
/**
 * Light, dark, or as the system: page.isDark(), page.setTheme(name), page.themeButton(). The window gets the event
 * "themechange" on a change.
 */
(function () {
  const THEMES = ["auto", "light", "dark"];
  const systemDark = window.matchMedia("(prefers-color-scheme: dark)");
  let theme = "auto";

  page.isDark = () => theme === "dark" || (theme === "auto" && systemDark.matches);

  page.setTheme = function (name) {
    theme = THEMES.includes(name) ? name : "auto";
    document.documentElement.dataset.theme = page.isDark() ? "dark" : "light";
    const button = document.getElementById("theme");
    if (button) button.textContent = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" }[theme];
    try { window.localStorage.setItem("profiler_wrapper.theme", theme); } catch { /* no storage for this file */ }
    window.dispatchEvent(new Event("themechange"));
  };

  page.themeButton = function () {
    const button = page.text("button", "", "small");
    button.type = "button";
    button.id = "theme";
    button.title = "Light, dark, or as the system";
    button.addEventListener("click", () => page.setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]));
    return button;
  };

  systemDark.addEventListener("change", () => page.setTheme(theme));

  /** Paper is white. */
  function drawAs(name) {
    document.documentElement.dataset.theme = name;
    window.dispatchEvent(new Event("themechange"));
  }
  window.addEventListener("beforeprint", () => drawAs("light"));
  window.addEventListener("afterprint", () => drawAs(page.isDark() ? "dark" : "light"));

  page.storedTheme = function () {
    try {
      return window.localStorage.getItem("profiler_wrapper.theme") || "auto";
    } catch {
      return "auto"; // no storage for this file
    }
  };
})();
