// The Watch tab as a page of its own: the recordings lie in it, and it asks no server for anything.

import { createPlacer } from "./frame.js";
import { linkTo, placeOf, readLink } from "./link.js";
import { createNote } from "./note.js";
import { createFollower } from "./place.js";
import { saveText } from "./save.js";
import { createStage } from "./stage.js";
import { themeButton } from "./theme.js";
import { createWatch } from "./watch.js";

/** Show the recordings that lie in the page's <script class="trace" data-slug="..."> elements, in their order. */
export function openSite() {
  const texts = new Map([...document.querySelectorAll("script.trace")].map((node) => [node.dataset.slug, node.textContent]));
  const placer = createPlacer();
  const note = createNote(document.querySelector(".page-note"), placer.put);
  let slug = null;
  const follow = createFollower(
    () => linkTo(location.href, stage.cursor || readLink(location.search)?.slug === slug ? slug : null, stage.cursor, { keep: true }),
    (url) => url !== location.href && history.replaceState(history.state, "", url),
  );
  const stage = createStage(document.getElementById("stage"), {
    placer,
    onCursor: follow,
    actions: [
      { name: "json", label: "Download trace", title: "The open recording as a JSON file, which the explorer can open", run: () => saveText(`river-${slug}.json`, texts.get(slug), "application/json") },
      { name: "link", label: "Copy link", title: "A link to this recording, at the locked token", run: copyLink },
    ],
  });
  const list = createWatch(document.getElementById("watch"), { pick: (wanted) => show(wanted) });

  function show(wanted, link = null) {
    const trace = JSON.parse(texts.get(wanted));
    const at = link ? placeOf(link, trace) : {};
    slug = wanted;
    if (at.error) note.show(at.error);
    stage.open(trace, { source: "recording", id: `recording:${slug}`, ...at, play: true });
    list.current(stage.id);
    follow();
  }

  async function copyLink() {
    const url = linkTo(location.href, slug, stage.cursor);
    try {
      await navigator.clipboard.writeText(url);
      note.show("The link is copied.", { brief: true });
    } catch {
      note.show(`The clipboard is not available here. The link is ${url}`);
    }
  }

  themeButton();
  list.list([...texts].map(([name, text]) => ({ slug: name, ...JSON.parse(text).header.recording })));
  const link = readLink(location.search);
  if (link && !texts.has(link.slug)) note.show("The link names a recording that this page does not have, so the first one is shown.");
  if (texts.has(link?.slug)) show(link.slug, link);
  else show(texts.keys().next().value);
}
