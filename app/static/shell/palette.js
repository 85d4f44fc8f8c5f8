// Goes to any session, screen or experiment, or does what the page can do, by a few letters of its name: Ctrl+K.
import { signal } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";
import { PRESETS } from "../experiments/sweep.js";
import { nameOf, shortId } from "../lib/format.js";
import { html } from "../lib/html.js";
import { EXPERIMENTS, experimentLink, go, HOME, linkTo } from "../state/route.js";
import { group, groupings } from "../sessions/listing.js";
import { creating } from "../sessions/open.js";
import { all, turnWord } from "../state/sessions.js";
import { nextTheme } from "./header.js";
import { Dialog, helping } from "./dialog.js";

const isOpen = signal(false);
const MOST = 12;

export function Palette() {
  useEffect(() => {
    const press = (event) => {
      if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.altKey || document.querySelector("dialog[open]")) return;
      event.preventDefault();
      isOpen.value = true;
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
  return isOpen.value && html`<${Dialog} title="Go to" class="palette" onClose=${() => (isOpen.value = false)}><${Choice} /><//>`;
}

/** `{name, about, link}` of all that there is to go to, and `{name, about, run}` of what can be done. */
const places = () => [
  { name: "Sessions", about: "all of them", link: HOME },
  { name: "Experiments", about: "activation patching", link: EXPERIMENTS },
  ...all().flatMap((view) => [
    { name: nameOf(view), about: `${shortId(view.id)}, ${turnWord(view)}`, link: linkTo(view.id) },
    { name: `${nameOf(view)}: inside the model`, about: shortId(view.id), link: linkTo(view.id, "model") },
  ]),
  ...PRESETS.map(({ title, form }) => ({ name: title, about: "an experiment", link: experimentLink(form) })),
  { name: "New session", about: "open one", link: HOME, run: () => (creating.value = true) },
  ...["", ...groupings.value].map((name) => ({ name: name ? `Group by ${name}` : "No groups", about: "sessions", link: HOME, run: () => group(name) })),
  { name: "Theme", about: "the next one", run: nextTheme },
  { name: "Keyboard", about: "its keys", run: () => (helping.value = true) },
];

function Choice() {
  const [typed, type] = useState("");
  const [at, move] = useState(0);
  const words = typed.toLowerCase().split(/\s+/).filter(Boolean);
  const begins = ({ name }) => name.toLowerCase().startsWith(words[0]);
  const found = places().filter(({ name, about }) => words.every((word) => `${name} ${about}`.toLowerCase().includes(word)))
    .sort((one, other) => begins(other) - begins(one)).slice(0, MOST);
  const here = Math.min(at, found.length - 1);
  const leave = ({ link, run }) => {
    isOpen.value = false;
    const here = location.hash;
    if (link) go(link);
    if (location.hash === here) run?.();
    else if (run) addEventListener("hashchange", run, { once: true }); // which would close a dialog that is open by then
  };
  const onKeyDown = (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by) move(Math.max(0, Math.min(found.length - 1, here + by)));
    else if (event.key === "Enter" && found[here]) leave(found[here]);
    else return;
    event.preventDefault();
  };
  return html`
    <input type="search" role="combobox" aria-label="Name" aria-expanded="true" aria-controls="palette-list" autocomplete="off" value=${typed}
      aria-activedescendant=${found.length ? `palette-${here}` : null} onKeyDown=${onKeyDown}
      onInput=${(event) => (type(event.target.value), move(0))} />
    <ul id="palette-list" role="listbox" aria-label="Places">${found.map((place, index) => html`<li key=${index} id=${`palette-${index}`} role="option"
      aria-selected=${index === here} onClick=${() => leave(place)}><span class="ellipsis">${place.name}</span> <span class="dim">${place.about}</span></li>`)}</ul>
    ${found.length === 0 && html`<p class="dim" role="status">Nothing has that name.</p>`}
  `;
}
