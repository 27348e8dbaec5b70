/** Which theme was chosen on this machine, and whether it is dark. */
export const THEMES = ["auto", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];
const KEY = "profiler_wrapper.theme";

export const system = matchMedia("(prefers-color-scheme: dark)");

export const isDark = (theme: Theme, isSystemDark: boolean): boolean => theme === "dark" || (theme === "auto" && isSystemDark);

export function stored(): Theme {
  try {
    return THEMES.find(one => one === localStorage.getItem(KEY)) ?? "auto";
  } catch {
    return "auto"; // no storage for this file
  }
}

export function store(theme: Theme): void {
  try {
    localStorage.setItem(KEY, theme);
  } catch { /* no storage for this file */ }
}
