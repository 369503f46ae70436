//! The file contract: contents of one node, which the server of the endpoint has chosen.
//!
//! Offsets are absolute, so a replayed read or write does no harm, and every reply returns the
//! buffer. A client in the server's process may read into a vacant block: the server then lends its
//! data without a copy ([`Block::put_slice`]). A [`CachingReader`] caches what it reads; the server
//! invalidates it with a [`ChangeNotifier`](crate::channel::ChangeNotifier).

mod reader;

pub use reader::{CHUNK_BYTES, CachingReader, ReadError};

use draconis_types::Block;
use draconis_types::{Attributes, FallocateMode, Refusal};

crate::contract! {
    /// The contents of one node.
    pub contract File served by FileServer, starting in Ready {
        /// Accepts every request.
        state Ready {
            /// Reads `len` bytes of the file at `offset` into `buffer` at `buffer_offset`.
            ///
            /// `AckRead::len` is less than requested only at the end of the file. A request that
            /// exceeds the buffer is refused with [`Refusal::Invalid`]. `no_atime` keeps the access
            /// time.
            call read: Read (buffer: Block) {
                buffer_offset: u32, offset: u64, len: u32, no_atime: bool
            }
                -> AckRead { len: u32 } => Ready
                 | NakRead why Refusal => Ready;

            /// Writes `len` bytes of `buffer` at `buffer_offset` to the file at `offset`.
            ///
            /// `AckWrite::len` bytes were accepted; they are durable after `Sync`. With
            /// `clear_privileges` the write clears setuid and setgid: see
            /// [`AttributeChange`](draconis_types::AttributeChange).
            call write: Write (buffer: Block) {
                buffer_offset: u32, offset: u64, len: u32, clear_privileges: bool
            }
                -> AckWrite { len: u32 } => Ready
                 | NakWrite why Refusal => Ready, or NotSupported;

            /// Returns the attributes of the file, as `stat`.
            call get_attributes: GetAttributes {}
                -> AckGetAttributes { attributes: Attributes } => Ready
                 | NakGetAttributes why Refusal => Ready;

            /// Returns the offset of the next data, or with `hole` of the next hole, at or after
            /// `offset`. The end of the file counts as a hole. `None` if `offset` is at or past the
            /// end, or no data follows it.
            call seek: Seek { offset: u64, hole: bool }
                -> AckSeek { offset: Option<u64> } => Ready
                 | NakSeek why Refusal => Ready, or NotSupported;

            /// Allocates or frees the blocks of `len` bytes from `offset`.
            call fallocate: Fallocate { offset: u64, len: u64, how: FallocateMode }
                -> AckReserve {} => Ready
                 | NakReserve why Refusal => Ready, or NotSupported;

            /// Makes earlier writes durable; with `data_only`, only the contents and the metadata
            /// needed to read them.
            call sync: Sync { data_only: bool }
                -> AckSync {} => Ready
                 | NakSync why Refusal => Ready, or NotSupported;

            tell close: Close {} => Done;
        }
        /// The channel is closed.
        state Done {}
    }
}

impl Read {
    /// Returns true if the request stays within its buffer and within 64 bits of file.
    pub fn is_in_bounds(&self) -> bool {
        is_range_in_bounds(&self.buffer, self.buffer_offset, self.offset, self.len)
    }
}

impl Write {
    /// Returns true if the request stays within its buffer and within 64 bits of file.
    pub fn is_in_bounds(&self) -> bool {
        is_range_in_bounds(&self.buffer, self.buffer_offset, self.offset, self.len)
    }
}

fn is_range_in_bounds(buffer: &Block, buffer_offset: u32, offset: u64, len: u32) -> bool {
    u64::from(buffer_offset) + u64::from(len) <= buffer.len() as u64
        && offset.checked_add(u64::from(len)).is_some()
}
