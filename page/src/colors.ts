/** Colours of phases, classes, categories and parts of a step, which Python gives; and what is read on them. */
import type { PageData } from "./page_data";

const FALLBACK = "#999999";
export type ColorKind = "phase" | "class" | "category" | "split" | "kind";

export function colorOf(data: PageData, kind: ColorKind, name: string | null | undefined): string {
  return data["page"]?.colors?.[kind]?.[name ?? ""] ?? FALLBACK;
}

/** Black or white, whichever is read more easily on `color`, #rrggbb. */
export function inkOn(color: string): "#000000" | "#ffffff" {
  const [red = 0, green = 0, blue = 0] = [1, 3, 5]
    .map(at => parseInt(color.slice(at, at + 2), 16) / 255)
    .map(light => (light <= 0.04045 ? light / 12.92 : ((light + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue; // as WCAG 2 defines contrast
  return (luminance + 0.05) ** 2 > 1.05 * 0.05 ? "#000000" : "#ffffff";
}

export type ThemeColor = "--paper" | "--panel" | "--ink" | "--soft" | "--line" | "--accent" | "--select" | "--bar" | "--warn" | "--good" | "--outlier" | "--faint";

/** A colour of the theme, for a canvas; read `drawnDark.value` of theme.ts beside it to draw again when it changes. */
export const themeColor = (name: ThemeColor): string => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
