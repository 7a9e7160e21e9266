// Files that the browser writes itself.

/** Offer `text` as a download, without asking any server. */
export function saveText(name, text, type) {
  saveBlob(name, new Blob([text], { type }));
}

/** Offer a blob as a download. */
export function saveBlob(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
