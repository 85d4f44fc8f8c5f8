// Reads and writes safetensors files: https://huggingface.co/docs/safetensors. Browsers have the byte order of the files.
const READERS = {
  F32: (bytes) => new Float32Array(bytes),
  F16: (bytes) => Float32Array.from(new Float16Array(bytes)),
  BF16: (bytes) => new Float32Array(Uint32Array.from(new Uint16Array(bytes), (half) => half << 16).buffer),
};

/** The tensors of a file in an ArrayBuffer, in the order of their names: `{shape, values, told}`, with `values` a Float32Array,
 * and `told` what the metadata has under the name. Throws a RangeError for a type that is not F32, F16 or BF16. */
export function read(buffer) {
  const start = 8 + Number(new DataView(buffer).getBigUint64(0, true));
  const entries = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, start - 8)));
  const { __metadata__: metadata = {} } = entries;
  delete entries.__metadata__;
  return Object.keys(entries).sort().map((name) => {
    const { dtype, shape, data_offsets: [first, end] } = entries[name];
    if (!READERS[dtype]) throw new RangeError(`The file has a tensor of ${dtype}; F32, F16 and BF16 can be read.`);
    return { shape, values: READERS[dtype](buffer.slice(start + first, start + end)), told: metadata[name] };
  });
}

/** A file with one F32 tensor, as a Blob. `values` is a Float32Array of one dimension. */
export function writeVector(values) {
  const entry = { dtype: "F32", shape: [values.length], data_offsets: [0, values.byteLength] };
  const header = JSON.stringify({ vector: entry });
  const padded = header.padEnd(8 * Math.ceil(header.length / 8));
  return new Blob([BigUint64Array.of(BigInt(padded.length)), padded, values]);
}
