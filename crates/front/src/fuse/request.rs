//! Buffers of a request and its reply: each thread has its own.
//!
//! ```text
//!   readv:   header of a write │ data of the predicted length │ the rest
//!   predicted write:             └─▶ lent to the tree, which may keep it
//!   any other request:         assembled at the front of the rest
//! ```
//!
//! With an oplog, write data is read into its page pool, and needs no copy for the oplog or the
//! write-back cache. Without one, data of the predicted length has its own buffer: a sequential
//! writer usually writes chunks of one length.

use std::io::IoSliceMut;
use std::os::fd::AsFd;
use std::sync::Arc;

use draconis_exchange::contract::file::{FileServer, Write};
use draconis_exchange::contract::request_log::{RequestData, RequestLog};
use draconis_exchange::contract::tree::Tree;
use draconis_exchange::heap::PoolBuffer;
use draconis_types::{Block, PrivateBuffer, SharedSlice};
use draconis_types::{Node, Refusal};
use rustix::io::Errno;

use super::decoder::{self, Header, WRITE_DATA_OFFSET};

/// Largest read or write of one request, in bytes: the kernel's limit without tuning.
pub(super) const MAX_IO_BYTES: usize = 1 << 20;
/// Space for the headers.
const MAX_HEADER_BYTES: usize = 4096;

/// Alignment of predicted lengths: whole blocks of any volume.
const PREDICTED_LEN_ALIGN_BYTES: usize = 1024;
/// Shorter data is copied, since a pool buffer takes whole pages.
const MIN_POOLED_BYTES: usize = 2048;
/// From this length on, buffers consist of whole pages, which are reused.
const MIN_PAGE_BUFFER_BYTES: usize = 64 << 10;

/// One request, and the buffer of its reply.
pub(super) struct Request {
    /// The request, except for write data of the predicted length. Other write data is passed to
    /// the tree in this block.
    block: Block,
    len: usize,
    reply: Vec<u8>,
    /// The first bytes, up to the write data.
    head: [u8; WRITE_DATA_OFFSET],
    /// Buffer for write data of the predicted length.
    predicted: WriteBuffer,
    /// The write data of the predicted length, as slices of a block.
    data: Option<Block>,
    /// The pool buffer that contains it.
    pool_buffer: Option<Arc<PoolBuffer>>,
    /// Length of the last write, in bytes.
    last_write: usize,
}

impl Request {
    pub(super) fn new() -> Self {
        // Zero pages, untouched until used.
        let reply = vec![0; MAX_IO_BYTES + MAX_HEADER_BYTES];
        Self {
            block: Block::private(MAX_IO_BYTES + MAX_HEADER_BYTES),
            len: 0,
            reply,
            head: [0; WRITE_DATA_OFFSET],
            predicted: WriteBuffer::new(0),
            data: None,
            pool_buffer: None,
            last_write: 0,
        }
    }

    /// Reads the next request. With a `recorder`, write data goes into a pool buffer while one is
    /// free.
    pub(super) fn read(
        &mut self,
        fuse: impl AsFd,
        recorder: Option<&dyn RequestLog>,
    ) -> Result<(), Errno> {
        self.prepare_buffers(recorder);
        self.len = rustix::io::readv(fuse, &mut self.buffers().map(IoSliceMut::new))?;
        self.assemble();
        Ok(())
    }

    /// Takes over the next request from these parts, as [`Self::read`] does from a device.
    pub(super) fn load(&mut self, parts: [&[u8]; 3], recorder: Option<&dyn RequestLog>) {
        self.prepare_buffers(recorder);
        self.len = copy_parts(parts, self.buffers());
        self.assemble();
    }

    fn prepare_buffers(&mut self, recorder: Option<&dyn RequestLog>) {
        (self.data, self.pool_buffer) = (None, None);
        if !matches!(self.predicted, WriteBuffer::Pooled(_))
            && let Some(room) = recorder.and_then(|recorder| recorder.allocate_buffer(MAX_IO_BYTES))
        {
            self.predicted = WriteBuffer::Pooled(room);
        }
    }

    /// Returns the memory that a request is read into, part after part.
    fn buffers(&mut self) -> [&mut [u8]; 3] {
        let Self { block, head, predicted: expected, .. } = self;
        let block = block.bytes_mut().unwrap_or_default();
        let before = head.len() + expected.as_ref().len();
        let (_, rest) = block.split_at_mut_checked(before).unwrap_or_default();
        [&mut head[..], expected.as_mut(), rest]
    }

    /// Passes data of the predicted length on without a copy, or assembles the request.
    fn assemble(&mut self) {
        let len = self.len;
        let writes = Header::parse(&self.head[..len.min(WRITE_DATA_OFFSET)])
            .is_some_and(Header::has_write_data);
        let data_len = len.saturating_sub(WRITE_DATA_OFFSET);
        let expected = self.predicted.as_ref().len();
        let lends = match self.predicted {
            WriteBuffer::Pooled(_) => (MIN_POOLED_BYTES..=expected).contains(&data_len),
            _ => data_len == expected && data_len > 0,
        };
        if writes && lends {
            let mut data = Block::unallocated(data_len);
            match std::mem::replace(&mut self.predicted, WriteBuffer::new(0)) {
                WriteBuffer::Pooled(mut room) => {
                    room.shorten(data_len);
                    let room = Arc::new(room);
                    data.put_slice(0, SharedSlice::from_owner(room.clone(), 0..data_len));
                    self.pool_buffer = Some(room);
                }
                memory => {
                    data.put_slice(0, SharedSlice::new(memory));
                    self.predicted = WriteBuffer::new(expected);
                }
            }
            self.data = Some(data);
        } else {
            // Usually short: only writes are long.
            let (head, behind) = (len.min(WRITE_DATA_OFFSET), data_len.min(expected));
            self.block.copy_in(0, &self.head[..head]);
            self.block.copy_in(head, &self.predicted.as_ref()[..behind]);
        }
        if writes && !matches!(self.predicted, WriteBuffer::Pooled(_)) && self.pool_buffer.is_none()
        {
            let repeated =
                data_len == self.last_write && data_len.is_multiple_of(PREDICTED_LEN_ALIGN_BYTES);
            if repeated && data_len != expected && data_len <= MAX_IO_BYTES {
                self.predicted = WriteBuffer::new(data_len);
            }
            self.last_write = data_len;
        }
    }

    /// Creates a request from logged bytes.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut request = Self::new();
        request.len = request.block.copy_in(0, bytes);
        (request.len == bytes.len()).then_some(request)
    }

    /// Truncates a logged write to `len` bytes of its data.
    pub(super) fn shorten_write(&mut self, len: u32) {
        self.block.copy_in(decoder::WRITE_LEN_OFFSET, &len.to_ne_bytes());
    }

    /// Returns header bytes and write data.
    pub(super) fn header_and_data(&self) -> (&[u8], RequestData<'_>) {
        let data = || self.data.as_ref().and_then(|data| data.slices().next());
        let contents = match &self.pool_buffer {
            Some(room) => RequestData::Buffer(room),
            None => RequestData::Bytes(data().unwrap_or_default()),
        };
        (self.bytes(), contents)
    }

    /// Returns true if nothing was read.
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the request, without detached write data.
    pub(super) fn bytes(&self) -> &[u8] {
        match &self.data {
            Some(_) => &self.head,
            None => self.block.bytes().and_then(|it| it.get(..self.len)).unwrap_or_default(),
        }
    }

    /// Returns the length of the write data that is detached from the other bytes.
    pub(super) fn detached_data_len(&self) -> usize {
        self.data.as_ref().map_or(0, Block::len)
    }

    /// Returns the contiguous request, and the buffer for its reply.
    pub(super) fn as_contiguous(&mut self) -> (&mut [u8], &mut [u8]) {
        if let Some(data) = self.data.take() {
            // An invalid write: only those are left to the library.
            self.block.copy_in(0, &self.head);
            self.block.copy_from(WRITE_DATA_OFFSET, &data, 0, data.len());
        }
        let bytes = self.block.bytes_mut().and_then(|bytes| bytes.get_mut(..self.len));
        (bytes.unwrap_or_default(), &mut self.reply)
    }

    /// Writes the data of the request. Data from the page cache is written completely or fails: the
    /// kernel would treat a short write as complete.
    pub(super) fn write_all_data<T: Tree>(
        &mut self,
        tree: &T,
        node: Node,
        write: decoder::Write,
    ) -> Result<u32, Refusal> {
        let mut done = self.write_once(tree, node, write, 0)?;
        while write.from_cache && done < write.len {
            done += match self.write_once(tree, node, write, done)? {
                0 => return Err(Refusal::NoSpace),
                more => more,
            };
        }
        Ok(done)
    }

    fn write_once<T: Tree>(
        &mut self,
        tree: &T,
        node: Node,
        write: decoder::Write,
        done: u32,
    ) -> Result<u32, Refusal> {
        let (block, data_at) = match &mut self.data {
            Some(data) => (data, 0),
            None => (&mut self.block, WRITE_DATA_OFFSET as u32),
        };
        let mut request = Write {
            buffer: block.take(),
            buffer_offset: data_at + done,
            offset: write.offset.saturating_add(done.into()),
            len: write.len - done,
            clear_privileges: write.clear_privileges,
        };
        let written = tree.file(node).write(&mut request);
        *block = request.buffer;
        written.map(|len| len.min(write.len - done))
    }
}

/// Copies parts into buffers, one after the other; returns the number of bytes copied.
fn copy_parts(parts: [&[u8]; 3], buffers: [&mut [u8]; 3]) -> usize {
    let mut buffers = buffers.into_iter();
    let (mut into, mut len) = (buffers.next().unwrap_or_default(), 0);
    for mut part in parts {
        while !part.is_empty() {
            if into.is_empty() {
                let Some(next) = buffers.next() else { return len };
                into = next;
                continue;
            }
            let now = part.len().min(into.len());
            let (filled, rest) = into.split_at_mut(now);
            filled.copy_from_slice(&part[..now]);
            (into, part, len) = (rest, &part[now..], len + now);
        }
    }
    len
}

/// Buffer for the data of one write.
enum WriteBuffer {
    Pooled(PoolBuffer),
    Small(Box<[u8]>),
    Pages(PrivateBuffer),
}

impl WriteBuffer {
    /// Allocates `len` bytes, all of which are overwritten before they are read.
    fn new(len: usize) -> Self {
        if len < MIN_PAGE_BUFFER_BYTES {
            Self::Small(vec![0; len].into_boxed_slice())
        } else {
            Self::Pages(PrivateBuffer::new_uninitialized(len))
        }
    }

    fn as_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Pooled(room) => room,
            Self::Small(bytes) => bytes,
            Self::Pages(bytes) => bytes,
        }
    }
}

impl AsRef<[u8]> for WriteBuffer {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Pooled(room) => room,
            Self::Small(bytes) => bytes,
            Self::Pages(bytes) => bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};

    use super::*;

    const OPCODE_WRITE: u32 = 16;

    fn request_message(opcode: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; WRITE_DATA_OFFSET];
        bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
        bytes.extend_from_slice(body);
        bytes
    }

    #[test]
    fn repeated_write_length_uses_separate_data_buffer() {
        let (flags, kind) = (SocketFlags::CLOEXEC, SocketType::SEQPACKET);
        let (kernel, device) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let mut request = Request::new();
        let mut ask = |opcode, len: usize| {
            let body: Vec<u8> = (0..len).map(|at| at as u8).collect();
            let sent = request_message(opcode, &body);
            send(&kernel, &sent, SendFlags::empty()).unwrap();
            request.read(&device, None).unwrap();
            let detached_len = request.detached_data_len();
            if detached_len > 0 {
                let data = request.data.as_ref().unwrap();
                assert!(data.slices().collect::<Vec<_>>().concat() == body);
            }
            assert!(request.bytes() == &sent[..sent.len() - detached_len], "{len}");
            let sent_len = sent.len();
            assert_eq!(request.as_contiguous().0.len(), sent_len);
            assert!(request.as_contiguous().0 == sent, "{len}");
            detached_len
        };
        let write = OPCODE_WRITE;
        assert_eq!([ask(write, 4096), ask(write, 4096), ask(write, 4096)], [0, 0, 4096]);
        // Other requests in between, also where a write was predicted.
        assert_eq!([ask(1, 4), ask(1, 5000), ask(write, 4096), ask(write, 100)], [0, 0, 4096, 0]);
        assert_eq!(
            [ask(write, 4096), ask(write, 5), ask(write, 5), ask(write, 5)],
            [4096, 0, 0, 0]
        );
        let long = 128 << 10;
        assert_eq!([ask(write, long), ask(write, long), ask(write, long)], [0, 0, long]);
        assert_eq!([ask(write, long), ask(write, 4096)], [long, 0]);
    }

    #[test]
    fn short_request_is_empty_or_invalid() {
        let (flags, kind) = (SocketFlags::CLOEXEC, SocketType::SEQPACKET);
        let (kernel, device) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let mut request = Request::new();
        send(&kernel, &[1, 2, 3], SendFlags::empty()).unwrap();
        request.read(&device, None).unwrap();
        assert_eq!((request.bytes(), request.is_empty()), (&[1, 2, 3][..], false));
        drop(kernel);
        request.read(&device, None).unwrap();
        assert!(request.is_empty() && request.bytes().is_empty());
    }
}
