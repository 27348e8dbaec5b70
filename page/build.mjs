// Builds what the package ships: `npm ci && npm run build`. `--check` only says whether the built files are as they would be.
import { build } from "esbuild";
import { readFile, writeFile } from "node:fs/promises";

const into = new URL("../profiler_wrapper/reports/page/", import.meta.url);
const result = await build({
  entryPoints: { page: "src/main.tsx", first: "src/first.ts" },
  outdir: "page",
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  legalComments: "none",
  charset: "ascii",
  loader: { ".css": "css" },
  write: false,
});
let changed = false;
for (const file of result.outputFiles) {
  const path = new URL(file.path.split("/").pop(), into);
  const there = await readFile(path, "utf8").catch(() => "");
  if (there === file.text) continue;
  changed = true;
  if (!process.argv.includes("--check")) await writeFile(path, file.text);
}
if (process.argv.includes("--check") && changed) {
  console.error("the built page is not that of its sources: npm run build");
  process.exit(1);
}
