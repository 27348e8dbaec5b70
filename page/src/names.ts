/** Names of kernels, short, and still distinct. */
import { grouped } from "./basis";
import { clean, cut } from "./format";

const NAMESPACES = /\b(?:at|c10|std|cuda|native|detail|internal|binary_internal)::|\(anonymous namespace\)::|<unnamed>::/g;
// What a kernel for any function differs by: the function. Those that only pass another on say nothing.
const FUNCTION = /\b(?!(?:AUnary|BUnary|Unary|Binary)Functor\b|gpu_kernel|gpu_kernel_impl)\w+(?:Functor\w*|_kernel_cuda|_kernel_impl|Ops?)\b/;

export type ShortName = (name: string, longest: number) => string;

/** A function that cuts one of `names`. */
export function kernelNames(names: Iterable<string>): ShortName {
  const plain = new Map([...new Set(names)].map(name => [name, clean(withoutCommon(name))]));
  const made = new Map<number, Map<string, string>>(); // by length
  return (name, longest) => {
    let shown = made.get(longest);
    if (!shown) made.set(longest, (shown = cutApart(plain, longest)));
    return shown.get(name) ?? cut(name, longest);
  };
}

/** Each name cut, and from where it differs from those that would be shown alike. */
function cutApart(plain: Map<string, string>, longest: number): Map<string, string> {
  const shown = new Map([...plain].map(([name, text]) => [name, cutAround(text, longest)]));
  for (const group of grouped([...plain.keys()], name => shown.get(name)).values()) {
    const texts = group.map(name => plain.get(name)!);
    if (new Set(texts).size > 1) for (const name of group) shown.set(name, fromDifference(plain.get(name)!, texts, longest));
  }
  return shown;
}

/** Without `void`, common namespaces and the arguments: `vectorized_elementwise_kernel<4, AddFunctor<float>>`. */
function withoutCommon(name: string): string {
  const short = name.slice(0, 4000).replace(/^void\s+/, "").replace(NAMESPACES, "");
  return short.endsWith(")") ? short.slice(0, argumentsAt(short)) || short : short;
}

/** Where the list of arguments at the end begins. */
function argumentsAt(text: string): number {
  let depth = 0;
  for (let i = text.length - 1; i >= 0; i--) {
    if (text[i] === ")") depth++;
    else if (text[i] === "(" && --depth === 0) return i;
  }
  return text.length;
}

/** The begin of a template, and what it is made for; of other names both ends. */
function cutAround(text: string, longest: number): string {
  const at = text.indexOf("<");
  const found = at > 0 && text.length > longest ? FUNCTION.exec(text.slice(at)) : null;
  if (!found) return cut(text, longest);
  return withPart(text, text.slice(0, at + 1), at + found.index, longest);
}

/** `begin`, cut to half of the room, and the text from `from` on. */
function withPart(text: string, begin: string, from: number, longest: number): string {
  const first = begin.length <= longest / 2 ? begin : begin.slice(0, Math.floor(longest / 2));
  if (from <= first.length) return endCut(text, longest);
  return `${first}…${endCut(text.slice(from), longest - first.length - 1)}`;
}

const endCut = (text: string, longest: number): string => (text.length <= longest ? text : `${text.slice(0, longest - 1)}…`);

function fromDifference(text: string, others: readonly string[], longest: number): string {
  const differs = Math.min(...others.filter(other => other !== text).map(other => {
    let at = 0;
    while (at < text.length && text[at] === other[at]) at++;
    return at;
  }));
  const least = Math.floor(longest * 0.4);
  return withPart(text, text.slice(0, least), Math.max(0, Math.min(differs, Math.max(least + 1, text.length - (longest - least - 1)))), longest);
}
