/** Small parts that every place uses: text that is cut, links that select, buttons that copy. */
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { isThere } from "./whole";
import { address, go, isSame, type Place, selection, type Selection } from "./state";

interface GoProps {
  to: Place;
  select?: Selection | undefined;
  children: ComponentChildren;
  title?: string | undefined;
  class?: string | undefined;
  id?: string;
  current?: "page" | undefined; // of the link to where one is
  onGo?: () => void;
}

/** A link that goes to a place and selects something there: a real address, for a new tab too. Of what is not in this run only its name. */
export function Go({ to, select, children, title, class: className, id, current, onGo }: GoProps): JSX.Element {
  if (select && !id && !isThere(select)) return <span title={title} class={className}>{children}</span>;
  const isChosen = !id && select && isSame(select, selection.value);
  const follow = (event: MouseEvent) => {
    if (event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault(); // step, range and sorts stay as they are
    go(to, select);
    onGo?.();
  };
  return <a href={address(to, select ?? null)} title={title} class={className} id={id} aria-current={current ?? (isChosen ? "true" : undefined)} onClick={follow}>{children}</a>;
}

/** A name with its colour before it. */
export function Marked({ color, children }: { color: string; children: ComponentChildren }): JSX.Element {
  return <span><span class="mark" style={{ background: color }} />{children}</span>;
}

export function CopyButton({ text, label = "Copy", title }: { text: string | (() => string); label?: string; title?: string }): JSX.Element {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(typeof text === "function" ? text() : text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1200);
  };
  return <button type="button" class="small" title={title} onClick={copy}>{copied ? "Copied" : label}</button>;
}

async function copyText(text: string): Promise<void> {
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
}

/** A row of buttons of which one is on. */
export function Segments<T extends string>({ label, options, chosen, onChoose }: { label: string; options: readonly (readonly [id: T, name: string, help?: string])[]; chosen: T; onChoose: (id: T) => void }): JSX.Element {
  return (
    <span class="segments" role="group" aria-label={label}>
      {options.map(([id, name, help]) => (
        <button key={id} type="button" class="small" data-id={id} title={help} aria-pressed={id === chosen} onClick={() => onChoose(id)}>{name}</button>
      ))}
    </span>
  );
}

/** One part of a place, with its heading. */
export function Section({ title, help, children, id }: { title: string; help?: string; children: ComponentChildren; id?: string }): JSX.Element {
  return <section id={id}><h2 title={help}>{title}</h2>{children}</section>;
}

/** What takes long to make, once all above it is seen. */
export function Later({ children }: { children: ComponentChildren }): JSX.Element {
  const [isDue, setDue] = useState(false);
  useEffect(() => { setDue(true); }, []);
  return isDue ? <>{children}</> : <div aria-busy="true" />;
}
