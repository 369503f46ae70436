//! Transmission: requests of one connection, carried out by several threads.
//!
//! Law 1: a thread holds the input while it reads a request, and the output while it writes a reply;
//! it holds no output while it uses the disk, and the input only as law 5 says.
//! Law 2: a thread reads a payload only once its bytes fit into the connection's budget. The thread that
//! waits for the budget has the input, so no more is read.
//! Law 3: [`MAX_READERS`] threads at most want the input. The others sleep, and one of them is woken
//! only if nobody is left to read: a request that takes microseconds keeps two threads busy, not 16.
//! Law 4: small writes that have arrived together are one batch: written together, answered together.
//! Each answer of its own would wake the client, and that takes longer than the write.
//! Law 5: a thread keeps the input while it carries out small writes, or a small read if no other
//! request has arrived: waking the next reader takes longer. After one that took longer than [`MAX_QUICK_TIME`] it does
//! not for [`SLOW_PERIOD_REQUESTS`]: the disk waits for a device, and requests must wait side by side.
//! It never does for a disk that can be unreachable: what needs no network is answered meanwhile.

use std::io::{BufReader, IoSlice, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Scope;
use std::time::{Duration, Instant};

use draconis_device::ZeroedSpace;
use draconis_types::PrivateBuffer;
use draconis_types::lock::{Condvar, Mutex, MutexGuard};

use crate::export::split;
use crate::wire::{
    self, BASE_ALLOCATION_ID, EXTENDED_REQUEST_BYTES, ErrorCode, Fields, Headers,
    MAX_PAYLOAD_BYTES, Request, STATE_HOLE_ZERO, STATUS_PAYLOAD_BYTES, chunk, cmd, cmd_flag,
};
use crate::{ConnectionError, Export, Session};

/// Maximum contents of the requests and replies of one connection in memory, in bytes.
pub const MAX_INFLIGHT_BYTES: u64 = 64 << 20;
/// Maximum number of threads of one connection, and so of its requests in flight.
pub const MAX_THREADS: usize = 16;
/// Maximum number of threads that read a request or wait to do so.
const MAX_READERS: usize = 2;
/// Stack of a thread, in bytes.
const STACK_BYTES: usize = 1 << 20;
/// Maximum writes of a batch.
const MAX_BATCH_WRITES: usize = 32;
/// Longest contents of a small request: only small writes are taken into a batch.
const MAX_SMALL_BYTES: u64 = 16 << 10;
/// Longest time that a request may take for the next ones to be taken for quick.
const MAX_QUICK_TIME: Duration = Duration::from_micros(100);
/// Number of requests after a slow one that are carried out side by side.
const SLOW_PERIOD_REQUESTS: u32 = 1000;
/// Shortest read whose holes are looked for: the answer costs less than the bytes.
const MIN_HOLE_READ_BYTES: u64 = 64 << 10;

/// What the threads of a connection share.
struct Shared<'s, R, W> {
    session: &'s Session<'s>,
    input: Mutex<Input<R>>,
    output: Mutex<W>,
    /// True once a reply could not be written: nothing more is read.
    is_broken: AtomicBool,
    budget: Budget,
    threads: Mutex<ThreadCount>,
    /// Notifies threads that sleep because there are enough readers.
    reader_needed: Condvar,
}

struct Input<R> {
    stream: BufReader<R>,
    /// True once no more requests are read.
    has_ended: bool,
    /// Reason, unless the client left.
    error: Option<ConnectionError>,
    /// Number of requests that are still taken for slow ones.
    slow_period: u32,
}

#[derive(Default)]
struct ThreadCount {
    all: usize,
    /// Threads that read a request, or wait to do so.
    reading: usize,
    sleeping: usize,
    /// True once no more requests are read.
    has_ended: bool,
}

/// Bytes of requests in memory.
#[derive(Default)]
struct Budget {
    used: Mutex<u64>,
    released: Condvar,
}

/// Bytes of the budget; released when dropped.
struct Reservation<'b>(&'b Budget, u64);

impl Budget {
    /// Waits until `bytes` fit. Any amount fits if nothing else is in memory.
    fn reserve(&self, bytes: u64) -> Reservation<'_> {
        let mut used = self.used.lock();
        while *used > 0 && *used + bytes > MAX_INFLIGHT_BYTES {
            self.released.wait(&mut used);
        }
        *used += bytes;
        Reservation(self, bytes)
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        *self.0.used.lock() -= self.1;
        self.0.released.notify_all();
    }
}

/// A request, its payload, and its memory.
struct Job<'b> {
    request: Request,
    /// Contents of a write, in pieces.
    payload: Vec<PrivateBuffer>,
    _reservation: Option<Reservation<'b>>,
}

impl Job<'_> {
    /// Returns true for a request that a page cache answers within microseconds, and beside which
    /// no other could be carried out: a disk makes one write after the other.
    fn is_quick(&self, is_alone: bool) -> bool {
        let Request { command, flags, len, .. } = self.request;
        let has_none_beside = command == cmd::WRITE || command == cmd::READ && is_alone;
        has_none_beside && len <= MAX_SMALL_BYTES && flags & cmd_flag::FUA == 0
    }
}

/// Contents of a reply.
enum Reply {
    Done,
    Error(ErrorCode),
    /// Contents of a read, in ascending order without gaps.
    Read(Vec<ReadChunk>),
    /// Lengths, and whether each is a hole.
    BlockStatus(Vec<(u64, bool)>),
}

enum ReadChunk {
    Hole { offset: u64, len: u64 },
    Data { offset: u64, pieces: Vec<PrivateBuffer> },
}

/// See [`crate::Connection::transmit`].
pub(crate) fn transmit<R: Read + Send, W: Write + Send>(
    input: BufReader<R>,
    output: W,
    session: &Session<'_>,
) -> Result<(), ConnectionError> {
    let shared = Shared {
        session,
        input: Mutex::new(Input { stream: input, has_ended: false, error: None, slow_period: 0 }),
        output: Mutex::new(output),
        is_broken: AtomicBool::new(false),
        budget: Budget::default(),
        threads: Mutex::new(ThreadCount { all: 1, ..ThreadCount::default() }),
        reader_needed: Condvar::new(),
    };
    let _counted = session.export.count_client();
    std::thread::scope(|scope| shared.serve_requests(scope));
    shared.input.into_inner().error.map_or(Ok(()), Err)
}

impl<R: Read + Send, W: Write + Send> Shared<'_, R, W> {
    /// Reads requests and carries them out, until there are no more.
    fn serve_requests<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        loop {
            self.enter_input();
            let jobs = self.serve_quick_requests(self.input.lock());
            if jobs.is_empty() {
                self.threads.lock().has_ended = true;
                self.reader_needed.notify_all();
                return;
            }
            self.leave_input(scope);
            self.serve(jobs);
        }
    }

    /// Carries out requests while it holds the input, as long as they are quick; returns the first
    /// during which another thread should read on, or nothing at the end.
    fn serve_quick_requests(&self, mut input: MutexGuard<'_, Input<R>>) -> Vec<Job<'_>> {
        loop {
            let jobs = self.read_jobs(&mut input);
            let is_alone = input.stream.buffer().is_empty();
            if self.session.export.can_be_unreachable()
                || !jobs.iter().all(|job| job.is_quick(is_alone))
            {
                return jobs;
            }
            if jobs.is_empty() || input.slow_period > 0 {
                input.slow_period = input.slow_period.saturating_sub(1);
                return jobs;
            }
            let start = Instant::now();
            self.serve(jobs);
            if start.elapsed() > MAX_QUICK_TIME {
                input.slow_period = SLOW_PERIOD_REQUESTS;
            }
        }
    }

    fn serve(&self, jobs: Vec<Job<'_>>) {
        let replies = self.carry_out(jobs);
        self.send_replies(&replies);
    }

    /// Waits while there are enough readers.
    fn enter_input(&self) {
        let mut threads = self.threads.lock();
        while threads.reading >= MAX_READERS && !threads.has_ended {
            threads.sleeping += 1;
            self.reader_needed.wait(&mut threads);
            threads.sleeping -= 1;
        }
        threads.reading += 1;
    }

    /// Ensures that another thread reads the next request while this one is carried out.
    fn leave_input<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        let mut threads = self.threads.lock();
        threads.reading -= 1;
        if threads.reading > 0 {
            return;
        }
        if threads.sleeping > 0 {
            self.reader_needed.notify_one();
            return;
        }
        if threads.all == MAX_THREADS {
            return;
        }
        let builder = std::thread::Builder::new().name("nbd".into()).stack_size(STACK_BYTES);
        // Without another thread this one reads on later.
        match builder.spawn_scoped(scope, || self.serve_requests(scope)) {
            Ok(_) => threads.all += 1,
            Err(error) => log::warn!("no thread for a connection: {error}"),
        }
    }

    /// Reads the next request and its payload, or a batch; nothing once there are no more.
    fn read_jobs(&self, input: &mut Input<R>) -> Vec<Job<'_>> {
        let mut jobs = vec![];
        let is_broken = self.is_broken.load(Ordering::Relaxed);
        if input.has_ended || is_broken || self.session.export.is_stopping() {
            return jobs;
        }
        loop {
            match self.read_from(&mut input.stream) {
                Ok(Some(job)) => jobs.push(job),
                Ok(None) => input.has_ended = true,
                Err(error) => {
                    input.has_ended = true;
                    input.error = Some(error);
                }
            }
            let goes_on = !input.has_ended
                && jobs.len() < MAX_BATCH_WRITES
                && jobs.last().is_some_and(|job| self.is_batched(&job.request))
                && self.has_batched_write(input.stream.buffer());
            if !goes_on {
                return jobs;
            }
        }
    }

    /// Returns true for a write that can be part of a batch.
    fn is_batched(&self, request: &Request) -> bool {
        request.command == cmd::WRITE
            && request.len <= MAX_SMALL_BYTES
            && request.flags & cmd_flag::FUA == 0
            && check_request(self.session, request).is_ok()
    }

    /// Returns true if `received` begins with a write for a batch and all its contents.
    fn has_batched_write(&self, received: &[u8]) -> bool {
        let headers = self.session.headers;
        let Some(header) = received.get(..headers.request_bytes()) else { return false };
        let contents = received.len() - header.len();
        Request::decode(header, headers).is_ok_and(|request| {
            self.is_batched(&request) && request.payload_len <= contents as u64
        })
    }

    fn read_from(&self, stream: &mut BufReader<R>) -> Result<Option<Job<'_>>, ConnectionError> {
        let mut bytes = [0; EXTENDED_REQUEST_BYTES];
        let headers = self.session.headers;
        let header = bytes.split_at_mut(headers.request_bytes()).0;
        // A client may also leave by closing the stream.
        if !read_exact_or_end(stream, header)? {
            return Ok(None);
        }
        let mut request = Request::decode(header, headers)?;
        if request.command == cmd::DISC {
            return Ok(None);
        }
        if request.payload_len > MAX_PAYLOAD_BYTES.into() {
            return Err(ConnectionError::Protocol("a payload that is too long"));
        }
        let is_status = request.command == cmd::BLOCK_STATUS;
        if is_status && request.payload_len == STATUS_PAYLOAD_BYTES.into() {
            let bytes: [u8; STATUS_PAYLOAD_BYTES as usize] = wire::read_array(stream)?;
            let mut fields = Fields(&bytes);
            let (len, id) = (fields.u64().unwrap_or(0), fields.u32());
            // Without a known context the request has no length, which is an error.
            request.len = if id == Some(BASE_ALLOCATION_ID) { len } else { 0 };
            request.payload_len = 0;
            request.flags &= !cmd_flag::PAYLOAD_LEN;
        }
        let mut job = Job { request, payload: vec![], _reservation: None };
        if check_request(self.session, &request).is_err() {
            wire::skip_bytes(stream, request.payload_len)?;
            return Ok(Some(job));
        }
        let is_write = request.command == cmd::WRITE;
        if is_write || request.command == cmd::READ {
            job._reservation = Some(self.budget.reserve(request.len));
        }
        if is_write {
            for (_, len) in split(request.offset, request.len) {
                let mut piece = PrivateBuffer::new_uninitialized(len);
                stream.read_exact(&mut piece)?;
                job.payload.push(piece);
            }
        }
        Ok(Some(job))
    }

    /// Carries out one request or a batch.
    fn carry_out<'j>(&self, jobs: Vec<Job<'j>>) -> Vec<(Request, Reply)> {
        let export = &self.session.export;
        if jobs.len() > 1 {
            let submit = |job: Job<'j>| {
                let Job { request, payload, _reservation } = job;
                (request, export.submit_write(request.offset, payload), _reservation)
            };
            let submitted: Vec<_> = jobs.into_iter().map(submit).collect();
            let wait = |(request, last, _reservation): (Request, Result<_, ErrorCode>, _)| {
                let done = last.and_then(|last| export.wait_written(last, false));
                (request, self.count(&request, done.map(|()| Reply::Done)))
            };
            return submitted.into_iter().map(wait).collect();
        }
        let carry_out = |job: Job<'j>| {
            let Job { request, payload, _reservation } = job;
            let done = check_request(self.session, &request)
                .and_then(|()| carry_out(self.session, &request, payload));
            (request, self.count(&request, done))
        };
        jobs.into_iter().map(carry_out).collect()
    }

    /// Counts a request that was carried out.
    fn count(&self, request: &Request, done: Result<Reply, ErrorCode>) -> Reply {
        let bytes = |command| match done.is_ok() && request.command == command {
            true => request.len,
            false => 0,
        };
        self.session.export.count_request(bytes(cmd::READ), bytes(cmd::WRITE));
        done.unwrap_or_else(Reply::Error)
    }

    fn send_replies(&self, replies: &[(Request, Reply)]) {
        let mut batch = vec![];
        if replies.len() > 1 {
            for (request, reply) in replies {
                let _ = self.send_reply(&mut batch, request, reply);
            }
        }
        let mut output = self.output.lock();
        if self.is_broken.load(Ordering::Relaxed) {
            return;
        }
        let sent = match replies {
            [(request, reply)] => self.send_reply(&mut *output, request, reply),
            _ => wire::write_all_parts(&mut *output, &mut [IoSlice::new(&batch)]),
        };
        if let Err(error) = sent {
            log::debug!("a reply was not sent: {error}");
            self.is_broken.store(true, Ordering::Relaxed);
        }
    }

    fn send_reply(
        &self,
        output: &mut impl Write,
        request: &Request,
        reply: &Reply,
    ) -> std::io::Result<()> {
        let headers = match self.session.headers {
            Headers::Structured if !matches!(request.command, cmd::READ | cmd::BLOCK_STATUS) => {
                Headers::Simple
            }
            headers => headers,
        };
        match headers {
            Headers::Simple => send_simple(output, request.cookie, reply),
            _ => {
                let Request { cookie, offset, .. } = *request;
                ChunkWriter { output, headers, cookie, offset }.send_reply(reply)
            }
        }
    }
}

/// Reads `bytes`; returns false if the stream ends before the first one.
fn read_exact_or_end(stream: &mut impl Read, bytes: &mut [u8]) -> std::io::Result<bool> {
    let mut got = 0;
    while let Some(rest) = bytes.get_mut(got..).filter(|rest| !rest.is_empty()) {
        match stream.read(rest) {
            Ok(0) if got == 0 => return Ok(false),
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => got += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Checks what a request says of itself.
fn check_request(session: &Session<'_>, request: &Request) -> Result<(), ErrorCode> {
    let Session { headers, allocation_context, .. } = *session;
    let export = &session.export;
    let payload_flag = match headers {
        Headers::Extended => cmd_flag::PAYLOAD_LEN,
        _ => 0,
    };
    let known_flags = match request.command {
        cmd::READ if headers != Headers::Simple => cmd_flag::DF,
        cmd::READ | cmd::FLUSH | cmd::CACHE => 0,
        cmd::WRITE if request.flags & payload_flag != payload_flag => return Err(ErrorCode::Inval),
        cmd::WRITE => cmd_flag::FUA | payload_flag,
        cmd::TRIM => cmd_flag::FUA,
        cmd::WRITE_ZEROES => cmd_flag::FUA | cmd_flag::NO_HOLE | cmd_flag::FAST_ZERO,
        cmd::BLOCK_STATUS if allocation_context => cmd_flag::REQ_ONE,
        _ => return Err(ErrorCode::Inval),
    };
    // FUA means nothing where nothing is written, and is allowed there.
    if request.flags & !(known_flags | cmd_flag::FUA) != 0 {
        return Err(ErrorCode::Inval);
    }
    let writes = matches!(request.command, cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES);
    if writes && export.is_read_only() {
        return Err(ErrorCode::Perm);
    }
    if request.command == cmd::FLUSH {
        return match (request.offset, request.len) {
            (0, 0) => Ok(()),
            _ => Err(ErrorCode::Inval),
        };
    }
    if !export.contains(request.offset, request.len) {
        let is_write = matches!(request.command, cmd::WRITE | cmd::WRITE_ZEROES);
        return Err(if is_write { ErrorCode::NoSpc } else { ErrorCode::Inval });
    }
    let is_too_long = request.command == cmd::READ && request.len > MAX_PAYLOAD_BYTES.into();
    let is_empty = request.command == cmd::BLOCK_STATUS && request.len == 0;
    if is_too_long || is_empty { Err(ErrorCode::Inval) } else { Ok(()) }
}

/// Carries out a request that was checked.
fn carry_out(
    session: &Session<'_>,
    request: &Request,
    payload: Vec<PrivateBuffer>,
) -> Result<Reply, ErrorCode> {
    let export = &*session.export;
    let Request { flags, command, offset, len, .. } = *request;
    let has_flag = |flag: u16| flags & flag != 0;
    let fua = has_flag(cmd_flag::FUA);
    match command {
        cmd::READ => {
            let finds_holes = session.headers != Headers::Simple
                && !has_flag(cmd_flag::DF)
                && len >= MIN_HOLE_READ_BYTES;
            return read(export, offset, len, finds_holes).map(Reply::Read);
        }
        cmd::WRITE => export.write(offset, payload, fua)?,
        cmd::FLUSH => export.flush_for_client()?,
        cmd::TRIM => export.trim(offset, len, fua)?,
        cmd::CACHE => export.cache(offset, len)?,
        cmd::WRITE_ZEROES => {
            let space = match has_flag(cmd_flag::NO_HOLE) {
                true => ZeroedSpace::Allocated,
                false => ZeroedSpace::Freed,
            };
            export.write_zeroes(offset, len, space, has_flag(cmd_flag::FAST_ZERO), fua)?;
        }
        cmd::BLOCK_STATUS => {
            let runs = export.block_status(offset, len, has_flag(cmd_flag::REQ_ONE))?;
            return Ok(Reply::BlockStatus(runs));
        }
        _ => return Err(ErrorCode::Inval),
    }
    Ok(Reply::Done)
}

fn read(
    export: &Export,
    offset: u64,
    len: u64,
    finds_holes: bool,
) -> Result<Vec<ReadChunk>, ErrorCode> {
    if len == 0 {
        return Ok(vec![]);
    }
    let data = |offset: u64, len: u64| {
        export.read(offset, len).map(|pieces| ReadChunk::Data { offset, pieces })
    };
    if !finds_holes {
        return Ok(vec![data(offset, len)?]);
    }
    let mut at = offset;
    let runs = export.block_status(offset, len, false)?;
    let mut chunks = vec![];
    for (len, is_hole) in runs {
        chunks.push(if is_hole { ReadChunk::Hole { offset: at, len } } else { data(at, len)? });
        at += len;
    }
    // The range of a fragmented file may have more runs than are told apart.
    let rest = (offset + len).saturating_sub(at);
    if rest > 0 {
        chunks.push(data(at, rest)?);
    }
    Ok(chunks)
}

/// Writes a simple reply, which cannot say where holes are.
fn send_simple(output: &mut impl Write, cookie: u64, reply: &Reply) -> std::io::Result<()> {
    let error = if let Reply::Error(code) = reply { *code as u32 } else { 0 };
    let mut header = vec![];
    header.extend(wire::SIMPLE_REPLY_MAGIC.to_be_bytes());
    header.extend(error.to_be_bytes());
    header.extend(cookie.to_be_bytes());
    let mut parts = vec![IoSlice::new(&header)];
    if let Reply::Read(chunks) = reply {
        for part in chunks {
            if let ReadChunk::Data { pieces, .. } = part {
                parts.extend(pieces.iter().map(|piece| IoSlice::new(piece)));
            }
        }
    }
    wire::write_all_parts(output, &mut parts)
}

/// Writer of the chunks of a structured or extended reply.
struct ChunkWriter<'w, W> {
    output: &'w mut W,
    headers: Headers,
    cookie: u64,
    /// Offset of the request.
    offset: u64,
}

impl<W: Write> ChunkWriter<'_, W> {
    fn send_reply(mut self, reply: &Reply) -> std::io::Result<()> {
        match reply {
            Reply::Done => self.send_chunk(true, chunk::NONE, &[], &[]),
            Reply::Error(code) => {
                // Error number, and a message of no length.
                let head = [&(*code as u32).to_be_bytes()[..], &[0; 2]].concat();
                self.send_chunk(true, chunk::ERROR, &head, &[])
            }
            Reply::Read(chunks) if chunks.is_empty() => {
                self.send_chunk(true, chunk::NONE, &[], &[])
            }
            Reply::Read(chunks) => {
                for (nth, part) in chunks.iter().enumerate() {
                    let is_last = nth + 1 == chunks.len();
                    match part {
                        ReadChunk::Hole { offset, len } => {
                            let len = (*len as u32).to_be_bytes();
                            let head = [&offset.to_be_bytes()[..], &len].concat();
                            self.send_chunk(is_last, chunk::OFFSET_HOLE, &head, &[])?;
                        }
                        ReadChunk::Data { offset, pieces } => {
                            let head = offset.to_be_bytes();
                            self.send_chunk(is_last, chunk::OFFSET_DATA, &head, pieces)?;
                        }
                    }
                }
                Ok(())
            }
            Reply::BlockStatus(runs) => {
                let is_extended = self.headers == Headers::Extended;
                let mut head = BASE_ALLOCATION_ID.to_be_bytes().to_vec();
                if is_extended {
                    head.extend((runs.len() as u32).to_be_bytes());
                }
                for (len, is_hole) in runs {
                    let state = if *is_hole { STATE_HOLE_ZERO } else { 0 };
                    if is_extended {
                        head.extend(len.to_be_bytes());
                        head.extend(u64::from(state).to_be_bytes());
                    } else {
                        head.extend((*len as u32).to_be_bytes());
                        head.extend(state.to_be_bytes());
                    }
                }
                let kind = if is_extended { chunk::BLOCK_STATUS_EXT } else { chunk::BLOCK_STATUS };
                self.send_chunk(true, kind, &head, &[])
            }
        }
    }

    fn send_chunk(
        &mut self,
        is_last: bool,
        kind: u16,
        head: &[u8],
        pieces: &[PrivateBuffer],
    ) -> std::io::Result<()> {
        let len = head.len() + pieces.iter().map(|piece| piece.len()).sum::<usize>();
        let is_extended = self.headers == Headers::Extended;
        let magic =
            if is_extended { wire::EXTENDED_REPLY_MAGIC } else { wire::STRUCTURED_REPLY_MAGIC };
        let mut header = vec![];
        header.extend(magic.to_be_bytes());
        header.extend(if is_last { chunk::DONE } else { 0 }.to_be_bytes());
        header.extend(kind.to_be_bytes());
        header.extend(self.cookie.to_be_bytes());
        if is_extended {
            header.extend(self.offset.to_be_bytes());
            header.extend((len as u64).to_be_bytes());
        } else {
            header.extend((len as u32).to_be_bytes());
        }
        header.extend(head);
        let mut parts = vec![IoSlice::new(&header)];
        parts.extend(pieces.iter().map(|piece| IoSlice::new(piece)));
        wire::write_all_parts(self.output, &mut parts)
    }
}
