// A trace file from the visitor's disk, made ready to be sent.

const MB = 1 << 20;

/**
 * The file's bytes in base64, gzipped where the browser can. `limits` has `sent` (bytes after compression) and `unpacked`.
 *
 * Throws an Error whose message is a sentence for the visitor.
 */
export async function packTraceFile(file, limits) {
  if (file.size > limits.unpacked) {
    throw new Error(`${file.name} is larger than ${limits.unpacked / MB} MB, which is the most that can be opened here.`);
  }
  let bytes = await readBytes(file);
  const zipped = bytes[0] === 0x1f && bytes[1] === 0x8b;
  // A browser that cannot compress sends the file as it is.
  if (!zipped && typeof CompressionStream === "function") bytes = await readBytes(new Response(new Blob([bytes]).stream().pipeThrough(new CompressionStream("gzip"))));
  if (bytes.length > limits.sent) {
    throw new Error(`${file.name} is larger than ${limits.sent / MB} MB when compressed, which is the most that can be opened here.`);
  }
  return toBase64(bytes);
}

async function readBytes(source) {
  try {
    return new Uint8Array(await source.arrayBuffer());
  } catch {
    throw new Error(`${source.name ?? "The file"} could not be read. Is it a folder, or was it moved?`);
  }
}

function toBase64(bytes) {
  let text = "";
  const step = 0x8000; // arguments that every engine takes in one call
  for (let at = 0; at < bytes.length; at += step) text += String.fromCharCode(...bytes.subarray(at, at + step));
  return btoa(text);
}
