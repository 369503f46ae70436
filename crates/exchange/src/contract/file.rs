//! The file contract: one node's bytes. The node is chosen when the end is bound.
//!
//! Offsets are absolute, so a replayed read or write does no harm, and the buffer comes
//! back in every reply. A client in the server's process may read into a vacant block: the
//! server lends its data then, and nothing is copied ([`Block::put_slice`]). Who reads again and again
//! does so with a [`CachingReader`], which keeps what it was answered: a server tells of every change
//! ([`ChangeNotifier`](crate::channel::ChangeNotifier)).

mod reader;

pub use reader::{CHUNK_BYTES, CachingReader, ReadError};

use super::{Attributes, FallocateMode, Refusal};
use crate::heap::Block;

crate::contract! {
    /// The bytes of one node.
    pub contract File served by FileServer, starting in Ready {
        /// Anything may be asked.
        state Ready {
            /// Reads `len` bytes of the file at `offset` into `buffer` at `buffer_offset`.
            ///
            /// `AckRead::len` is less than asked only at the end of the file. A request
            /// that reaches beyond the buffer is refused with [`Refusal::Invalid`].
            /// With `no_atime` the time of access stays.
            call read: Read (buffer: Block) {
                buffer_offset: u32, offset: u64, len: u32, no_atime: bool
            }
                -> AckRead { len: u32 } => Ready
                 | NakRead why Refusal => Ready;

            /// Writes `len` bytes of `buffer` at `buffer_offset` to the file at `offset`.
            ///
            /// `AckWrite::len` bytes were taken; durable after `Sync`. With
            /// `clear_privileges` the writer may not keep setuid and setgid: see
            /// [`AttributeChange`](super::AttributeChange).
            call write: Write (buffer: Block) {
                buffer_offset: u32, offset: u64, len: u32, clear_privileges: bool
            }
                -> AckWrite { len: u32 } => Ready
                 | NakWrite why Refusal => Ready, or NotSupported;

            /// What `stat` tells of the file.
            call get_attributes: GetAttributes {}
                -> AckGetAttributes { attributes: Attributes } => Ready
                 | NakGetAttributes why Refusal => Ready;

            /// Where the next data begins, or with `hole` the next hole, at or after
            /// `offset`; the end of the file counts as a hole. `None` where there is
            /// none: `offset` is not before the end, or no data follows it.
            call seek: Seek { offset: u64, hole: bool }
                -> AckSeek { offset: Option<u64> } => Ready
                 | NakSeek why Refusal => Ready, or NotSupported;

            /// Gives blocks to the `len` bytes from `offset`, or takes them away.
            call fallocate: Fallocate { offset: u64, len: u64, how: FallocateMode }
                -> AckReserve {} => Ready
                 | NakReserve why Refusal => Ready, or NotSupported;

            /// Makes what was written durable; with `data_only`, whatever is needed to
            /// read it back and no more.
            call sync: Sync { data_only: bool }
                -> AckSync {} => Ready
                 | NakSync why Refusal => Ready, or NotSupported;

            tell close: Close {} => Done;
        }
        /// Nothing more is said.
        state Done {}
    }
}

impl Read {
    /// Whether the request stays within its buffer and within 64 bits of file.
    pub fn is_in_bounds(&self) -> bool {
        fits(&self.buffer, self.buffer_offset, self.offset, self.len)
    }
}

impl Write {
    /// Whether the request stays within its buffer and within 64 bits of file.
    pub fn fits(&self) -> bool {
        fits(&self.buffer, self.buffer_offset, self.offset, self.len)
    }
}

fn fits(buffer: &Block, buffer_offset: u32, offset: u64, len: u32) -> bool {
    u64::from(buffer_offset) + u64::from(len) <= buffer.len() as u64
        && offset.checked_add(u64::from(len)).is_some()
}
