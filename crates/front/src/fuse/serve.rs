//! Reads the kernel's requests with one thread at a time, and answers them in the thread that read
//! them.
//!
//! ```text
//!   leader ─ read ─ reply ─ read ─ reply ─ read fsync ─┐ makes a follower the leader,
//!   follower ······································ leader ┴ read ─ reply ...        and syncs
//! ```
//!
//! On a small machine a second reader costs more wake-ups than it saves. So there is one, unless a
//! request waits for the disk. Its thread then makes a follower the leader, and answers once the
//! disk is done: requests behind it continue. Requests that wait for the same share a flush and a
//! thread: see [`sync_batch`](super::sync_batch).
//!
//! Over rings each queue has a reader: see [`queues`]. The device file still has forgets.

mod change;
mod queues;
mod replay;

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Scope;
use std::time::{Duration, Instant};

use draconis_exchange::contract::directory::SyncVolume;
use draconis_exchange::contract::file::{FileServer, Read};
use draconis_exchange::contract::request_log::RequestLog;
use draconis_exchange::contract::tree::Tree;
use draconis_exchange::notices::NoticeSender;
use draconis_types::Block;
use draconis_types::Refusal;
use draconis_types::injected_fault::{DelayPoint, InjectedFault};
use draconis_types::lock::{Mutex, MutexGuard};
use fuse_backend_rs::api::server;
use fuse_backend_rs::transport::{FuseBuf, FuseDevWriter, Reader, Writer};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use self::change::ChangeReply;
use self::queues::Helpers;
use self::replay::PendingReplies;
use super::activity::Activity;
use super::decoder::{self, Header, Message, UNIQUE_RESEND};
use super::handler::Handler;
use super::init::InitRequest;
use super::notify::{Notifier, NotifyTask, PageCacheFilter};
use super::open;
use super::options::ServerOptions;
use super::reply::{self, Reply, ReplyBody};
use super::request::{MAX_IO_BYTES, Request};
use super::ring::RingSet;
use super::sync_batch::{SyncBatcher, SyncRequest};
use super::transport::Transport;

/// Maximum number of threads: all but one may wait for the disk.
const MAX_FUSE_THREADS: usize = 8;

/// Serves a tree to the kernel.
pub struct Server<'a, T: Tree + Sync> {
    pub(super) tree: &'a T,
    options: ServerOptions,
    server: server::Server<Handler<'a, T>>,
    /// Nodes of which the kernel may have cached pages.
    pub(super) pages: PageCacheFilter,
    /// Negotiated: see [`NegotiatedFeatures`](super::init::NegotiatedFeatures).
    setxattr_ext: AtomicBool,
    /// Logs requests for the successor.
    pub(super) recorder: Option<&'a dyn RequestLog>,
    /// Unsent answers of earlier servers.
    pending_replies: PendingReplies,
    /// Sends the notifications on which the kernel may block.
    notices: Option<&'a NoticeSender>,
    rings: Option<&'a RingSet>,
}

impl<'a, T: Tree + Sync> Server<'a, T> {
    /// Creates a server of `tree`.
    pub fn new(tree: &'a T, options: ServerOptions) -> Self {
        let server = server::Server::new(Handler::new(tree));
        // Every kernel that a restarted server can meet has the long form.
        let setxattr_ext = AtomicBool::new(tree.is_writable());
        let (pages, pending_replies) = (PageCacheFilter::default(), PendingReplies::default());
        let (recorder, notices, rings) = (None, None, None);
        Self {
            tree,
            options,
            server,
            pages,
            setxattr_ext,
            recorder,
            pending_replies,
            notices,
            rings,
        }
    }

    /// Logs requests, and replays those of an earlier server.
    pub fn with_recorder(self, recorder: &'a dyn RequestLog) -> Self {
        Self { recorder: Some(recorder), ..self }
    }

    /// Has another process send the notifications on which the kernel may block: see
    /// [`notices`](draconis_exchange::notices).
    pub fn with_notices(self, notices: &'a NoticeSender) -> Self {
        Self { notices: Some(notices), ..self }
    }

    /// Serves requests over rings, if the kernel agrees. Such a mount ends with its server: the
    /// kernel does not send again what a server that died had not answered.
    pub fn with_rings(self, rings: &'a RingSet) -> Self {
        let options = ServerOptions { over_rings: true, ..self.options };
        Self { rings: Some(rings), options, ..self }
    }

    /// Returns true if the kernel has agreed to send requests over rings.
    pub(super) fn is_over_rings(&self) -> bool {
        self.rings.is_some_and(RingSet::is_used)
    }

    /// Serves requests until the mount ends.
    ///
    /// `fuse` may be new, or initialised already by an earlier server of the same tree.
    ///
    /// # Errors
    /// The kernel's error if a request cannot be read.
    pub fn serve(&self, fuse: impl AsFd + Sync, activity: &Activity) -> io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(&fuse)?;
        rustix::fs::fcntl_setfl(&fuse, flags | rustix::fs::OFlags::NONBLOCK)?;
        let (notifier, late) = Notifier::new();
        self.replay_oplog(&fuse);
        let transport = Transport { fuse: fuse.as_fd(), rings: self.rings };
        let threads_of_mount = LeaderFollowers::new(self, transport, activity, &notifier);
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .name("fuse-late".into())
                .spawn_scoped(scope, move || {
                    late.into_iter().for_each(|late| self.run_deferred(transport, late))
                })?;
            let served = threads_of_mount.run_thread(scope);
            if let Some(rings) = self.rings.filter(|_| served.is_err()) {
                rings.report_failure();
            }
            threads_of_mount.helpers.close();
            notifier.close();
            served
        })
    }

    fn run_deferred(&self, transport: Transport<'_>, late: NotifyTask) {
        let fuse = transport.fuse;
        match late {
            NotifyTask::NotifyThenReply { both, deferred } => {
                let [notice, reply] = *both;
                log_send_error(self.notify(fuse, &notice, None));
                transport.send_reply(&reply);
                if let (Some(recorder), Some(deferred)) = (self.recorder, deferred) {
                    recorder.finish_deferred(deferred);
                }
            }
            NotifyTask::CheckOrphan(node) => {
                let recorder = self.recorder.filter(|_| self.is_unused(fuse, node, None));
                if let Some(recorder) = recorder {
                    recorder.release_orphan(node);
                }
            }
        }
    }

    /// Sends a notification, and returns once the kernel has executed it, or after `wait`.
    ///
    /// # Errors
    /// The kernel's error; [`Errno::TIMEDOUT`].
    pub(super) fn notify(
        &self,
        fuse: impl AsFd,
        notice: &Reply,
        wait: Option<Duration>,
    ) -> rustix::io::Result<()> {
        match self.notices {
            Some(notices) => notices.send(notice.as_bytes(), wait),
            None => rustix::io::write(fuse, notice.as_bytes()).map(drop),
        }
    }

    /// Answers a decoded request.
    fn answer_message(&self, link: &Connection<'_>, header: Header, message: Message) {
        let node = header.node;
        let answer = match message {
            Message::Init(init) => self.negotiate(init),
            Message::Open { directory, access } => {
                into_errno_or_enosys(open::open(self.tree, node, access, directory))
            }
            Message::Read(read) => return self.answer_read(link, header, read),
            Message::GetFlags { room } => {
                into_errno(self.attributes(node).map(|it| reply::ioctl_u32_reply(it.flags, room)))
            }
            Message::GetVersion { room } => into_errno(
                self.attributes(node).map(|it| reply::ioctl_u32_reply(it.generation, room)),
            ),
            Message::GetExtended => {
                let found = self.attributes(node);
                let len = decoder::FSXATTR_BYTES;
                into_errno(
                    found.map(|it| reply::ioctl_fsxattr_reply(decoder::to_xflags(it.flags), len)),
                )
            }
            Message::Statx => into_errno(self.attributes(node).map(|it| reply::statx_reply(&it))),
            Message::SyncVolume => {
                into_errno(self.tree.sync_volume(&mut SyncVolume {}).map(|()| ReplyBody::default()))
            }
        };
        link.send_reply(&reply_to(header, answer));
    }

    fn negotiate(&self, init: InitRequest) -> Result<ReplyBody, Errno> {
        let answer = init.negotiate(self.options, self.tree.is_writable());
        let (answer, agreed) = answer.ok_or(Errno::PROTO)?;
        self.setxattr_ext.store(agreed.setxattr_ext, Ordering::Relaxed);
        if let Some(rings) = self.rings.filter(|_| agreed.over_rings) {
            rings.set_used();
        }
        Ok(answer)
    }

    /// Reads; data that the tree lends goes to the kernel without a copy.
    fn answer_read(&self, link: &Connection<'_>, header: Header, read: decoder::Read) {
        let mut request = Read {
            buffer: Block::unallocated(read.len as usize),
            buffer_offset: 0,
            offset: read.offset,
            len: read.len,
            no_atime: read.no_atime && !InjectedFault::NoAtime.is_made(),
        };
        // The kernel requests no more at once.
        let told = match read.len as usize {
            ..=MAX_IO_BYTES => self.tree.file(header.node).read(&mut request),
            _ => Err(Refusal::Invalid),
        };
        match told.and_then(|len| leading_slices(len, &request.buffer).ok_or(Refusal::Io)) {
            Ok(data) => link.send_data(header.unique, &data),
            Err(why) => link.send_reply(&reply_to(header, Err(why.errno()))),
        }
    }

    /// Returns true if the kernel sends the long form of `setxattr`.
    pub(super) fn has_setxattr_ext(&self) -> bool {
        self.setxattr_ext.load(Ordering::Relaxed)
    }
}

/// Returns the first `len` bytes of a block as slices; `None` if they cannot be lent.
fn leading_slices(len: u32, block: &Block) -> Option<Vec<&[u8]>> {
    let mut left = len as usize;
    let mut data = vec![];
    for piece in block.slices() {
        let piece = piece.get(..left).unwrap_or(piece);
        left -= piece.len();
        data.push(piece);
    }
    (left == 0).then_some(data)
}

/// Converts a refusal to an errno.
pub(super) fn into_errno(answer: Result<ReplyBody, Refusal>) -> Result<ReplyBody, Errno> {
    answer.map_err(Refusal::errno)
}

/// Converts a refusal of an optional operation: after ENOSYS, the kernel does not send it again.
pub(super) fn into_errno_or_enosys(answer: Result<ReplyBody, Refusal>) -> Result<ReplyBody, Errno> {
    answer.map_err(|why| if why == Refusal::NotSupported { Errno::NOSYS } else { why.errno() })
}

pub(super) fn reply_to(header: Header, answer: Result<ReplyBody, Errno>) -> Reply {
    match answer {
        Ok(answer) => Reply::new(header.unique, 0, answer.as_bytes()),
        Err(errno) => Reply::new(header.unique, errno.raw_os_error(), &[]),
    }
}

/// The kernel connection, the notifier and the oplog.
pub(super) struct Connection<'l> {
    transport: Transport<'l>,
    pub(super) notifier: &'l Notifier,
    pub(super) recorder: Option<&'l dyn RequestLog>,
}

impl Connection<'_> {
    /// Sends the answer to a change, after its notifications.
    fn send_change_reply(&self, header: Header, answer: ChangeReply) {
        if answer.outdates_attributes {
            self.send_reply(&Reply::invalidate_attributes(header.node));
        }
        let Some(notice) = answer.drop_pages else { return self.send_reply(&answer.reply) };
        let deferred = self.recorder.and_then(|recorder| recorder.defer_completion());
        self.notifier
            .send(NotifyTask::NotifyThenReply { both: Box::new([notice, answer.reply]), deferred });
    }

    fn send_reply(&self, reply: &Reply) {
        self.transport.send_reply(reply);
    }

    /// Replies with data, without a copy.
    fn send_data(&self, unique: u64, data: &[&[u8]]) {
        let head = Reply::data_header(unique, data.iter().map(|piece| piece.len()).sum());
        let data = data.iter().copied().filter(|piece| !piece.is_empty());
        let parts: Vec<_> = [&head[..]].into_iter().chain(data).map(IoSlice::new).collect();
        self.transport.send(&parts);
    }
}

/// Logs a failed send, which has no consequence.
fn log_send_error(told: rustix::io::Result<()>) {
    if let Err(error) = told {
        // Usually, the request was withdrawn.
        log::debug!("a reply was not taken: {error}");
    }
}

/// The threads of one mount: the leader reads.
pub(super) struct LeaderFollowers<'s, 'a, T: Tree + Sync> {
    server: &'s Server<'a, T>,
    transport: Transport<'s>,
    activity: &'s Activity,
    notifier: &'s Notifier,
    /// The thread that holds the lock reads requests.
    leader: Mutex<PollBudget>,
    threads: AtomicUsize,
    /// Number of threads that wait to become the leader.
    followers: AtomicUsize,
    syncs: SyncBatcher,
    /// Threads that answer what the readers of queues must not wait for.
    helpers: Helpers,
}

impl<'s, 'a, T: Tree + Sync> LeaderFollowers<'s, 'a, T> {
    pub(super) fn new(
        server: &'s Server<'a, T>,
        transport: Transport<'s>,
        activity: &'s Activity,
        notifier: &'s Notifier,
    ) -> Self {
        let (threads, followers) = (AtomicUsize::new(1), AtomicUsize::new(0));
        let leader = Mutex::new(PollBudget::new(server.options.no_polling));
        let (syncs, helpers) = (SyncBatcher::default(), Helpers::default());
        Self { server, transport, activity, notifier, leader, threads, followers, syncs, helpers }
    }

    /// Runs one thread until the mount ends.
    fn run_thread<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> io::Result<()> {
        let mut request = Request::new();
        loop {
            let mut poll_budget = self.become_leader();
            loop {
                match request.read(self.transport.fuse, self.server.recorder) {
                    // A socket instead of a device: the peer has closed it.
                    Ok(()) if request.is_empty() => return Ok(()),
                    Ok(()) => {}
                    Err(Errno::AGAIN) => {
                        if self.server.is_over_rings() {
                            poll_budget.wait_for_forgets(self.transport)?;
                        } else {
                            poll_budget.poll_or_sleep(self.transport.fuse)?;
                        }
                        continue;
                    }
                    // Interrupted, or the request was withdrawn before it was read.
                    Err(Errno::INTR | Errno::NOENT) => continue,
                    // Unmounted or aborted: the other threads get the same error.
                    Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(()),
                    Err(errno) => return Err(errno.into()),
                }
                poll_budget.record_arrival();
                let Some(header) = Header::parse(request.bytes()) else { continue };
                self.activity.count_opcode(header.opcode);
                if self.sends_pending_reply(header) {
                    continue;
                }
                self.server.pending_replies.note_request(
                    self.server.recorder,
                    header,
                    self.notifier,
                );
                if let Some(data_only) = header.fsync_data_only(request.bytes()) {
                    if !self.enqueue_sync(SyncRequest { header, data_only }) {
                        continue;
                    }
                    if self.ensure_follower(scope) {
                        drop(poll_budget);
                        self.run_sync_batches();
                        break;
                    }
                    self.run_sync_batches();
                    continue;
                }
                let can_block = header.may_block() || self.may_block(header, &request);
                if can_block && self.ensure_follower(scope) {
                    drop(poll_budget);
                    if header.is_seek() {
                        self.flush_kernel_pages(header, &request);
                    }
                    self.handle_request(header, &mut request);
                    break;
                }
                self.activity.begin_request(0);
                self.handle_request(header, &mut request);
                self.activity.end_request(0);
                if header.is_init() && self.server.is_over_rings() {
                    self.start_queues(scope)?;
                }
            }
        }
    }

    /// Sends the pending reply to a request that the kernel sent again, if there is one. The leader
    /// does so: a new request that another leader reads drops all pending replies.
    fn sends_pending_reply(&self, header: Header) -> bool {
        let is_kept = header.is_resent()
            && self.server.pending_replies.send_pending(&self.connection(), header);
        if is_kept {
            DelayPoint::Read.pass();
        }
        is_kept
    }

    /// Enqueues a sync; returns true if this thread has to run the batch.
    fn enqueue_sync(&self, sync: SyncRequest) -> bool {
        DelayPoint::Read.pass();
        let unique = sync.header.unique & !UNIQUE_RESEND;
        match self.server.recorder.filter(|recorder| recorder.is_quarantined(unique)) {
            Some(recorder) => {
                recorder.report_quarantined(sync.header.describe());
                self.transport.send_reply(&reply_to(sync.header, Err(Errno::IO)));
                false
            }
            None => self.syncs.enqueue(sync),
        }
    }

    /// Runs batches of syncs until none waits.
    fn run_sync_batches(&self) {
        let mut syncs = self.syncs.next_batch(0);
        while let Some(first) = syncs.first() {
            if let Some(recorder) = self.server.recorder {
                recorder.begin_request(first.header.unique & !UNIQUE_RESEND, None);
            }
            let files: Vec<_> = syncs.iter().map(|it| (it.header.node, it.data_only)).collect();
            let done = self.server.tree.sync_files(&files);
            for sync in &syncs {
                let answer = into_errno_or_enosys(done.map(|()| ReplyBody::default()));
                self.transport.send_reply(&reply_to(sync.header, answer));
                self.activity.count_reply();
                DelayPoint::Answered.pass();
            }
            if let Some(recorder) = self.server.recorder {
                recorder.finish_request();
            }
            syncs = self.syncs.next_batch(syncs.len());
        }
    }

    /// Returns true if the reply may depend on other replies: on pages that the kernel writes back,
    /// or files that it forgets.
    fn may_block(&self, header: Header, request: &Request) -> bool {
        let tree = self.server.tree;
        tree.is_writable()
            && (header.is_seek() || header.is_mutation(request.bytes()) && tree.is_low_on_space())
    }

    fn become_leader(&self) -> MutexGuard<'_, PollBudget> {
        self.followers.fetch_add(1, Ordering::Relaxed);
        let leader = self.leader.lock();
        self.followers.fetch_sub(1, Ordering::Relaxed);
        leader
    }

    /// Finds or starts a follower; returns false if there are too many threads. Only the leader
    /// calls this.
    fn ensure_follower<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> bool {
        if self.followers.load(Ordering::Relaxed) > 0 {
            return true;
        }
        if self.threads.load(Ordering::Relaxed) == MAX_FUSE_THREADS {
            return false;
        }
        let builder = std::thread::Builder::new().name("fuse-too".into());
        let started = builder.spawn_scoped(scope, move || {
            if let Err(error) = self.run_thread(scope) {
                log::error!("a request could not be read: {error}");
            }
        });
        if started.is_ok() {
            self.threads.fetch_add(1, Ordering::Relaxed);
        }
        started.is_ok()
    }

    /// Has the kernel write dirty pages back before a seek is answered, since the kernel does not
    /// do so itself. Other threads answer those writes.
    fn flush_kernel_pages(&self, header: Header, request: &Request) {
        if let Some(offset) = decoder::seek_offset(request.bytes()) {
            let notice = Reply::invalidate_pages(header.node, offset, 0);
            log_send_error(self.server.notify(self.transport.fuse, &notice, None));
        }
    }

    /// Executes a request, and logs it meanwhile.
    fn handle_request(&self, header: Header, request: &mut Request) {
        let Some(recorder) = self.server.recorder else {
            return self.execute_request(header, request);
        };
        let unique = header.unique & !UNIQUE_RESEND;
        DelayPoint::Read.pass();
        if recorder.is_quarantined(unique) {
            recorder.report_quarantined(header.describe());
            return self.transport.send_reply(&reply_to(header, Err(Errno::IO)));
        }
        let changes = self.server.tree.is_writable() && header.is_mutation(request.bytes());
        recorder.begin_request(unique, changes.then(|| request.header_and_data()));
        self.execute_request(header, request);
        DelayPoint::Answered.pass();
        recorder.finish_request();
        for node in header.forgotten_nodes(request.bytes()).filter(|node| recorder.is_orphan(*node))
        {
            self.notifier.send(NotifyTask::CheckOrphan(node));
        }
    }

    fn execute_request(&self, header: Header, request: &mut Request) {
        let server = self.server;
        let unique = header.unique & !UNIQUE_RESEND;
        log::debug!("request {unique}: {}", header.describe());
        if header.fills_page_cache(request.bytes()) {
            server.pages.insert(header.node);
        }
        let link = self.connection();
        if header.is_mutation(request.bytes()) {
            let answer = server.apply_request(header, request);
            if let Some(recorder) = server.recorder {
                recorder.record_outcome(answer.outcome);
            }
            link.send_change_reply(header, answer);
        } else {
            match decoder::decode(header, request.bytes()) {
                Some(message) => server.answer_message(&link, header, message),
                None => self
                    .transport
                    .send_from_file(header.unique, |fd| self.handle_with_library(request, fd)),
            }
        }
        log::debug!("request {unique}: executed");
        self.activity.count_reply();
    }

    fn connection(&self) -> Connection<'_> {
        let (transport, recorder) = (self.transport, self.server.recorder);
        Connection { transport, notifier: self.notifier, recorder }
    }

    fn handle_with_library(&self, request: &mut Request, into: BorrowedFd<'_>) {
        let (bytes, reply) = request.as_contiguous();
        let raw = into.as_raw_fd();
        let handled = Reader::from_fuse_buffer(FuseBuf::new(bytes))
            .and_then(|reader| Ok((reader, FuseDevWriter::new(raw, reply)?)))
            .map_err(|error| error.to_string())
            .and_then(|(reader, writer)| {
                let writer = Writer::<'_, ()>::FuseDev(writer);
                let handled = self.server.server.handle_message(reader, writer, None, None);
                handled.map_err(|error| error.to_string())
            });
        if let Err(error) = handled {
            // Usually a reply to a withdrawn request.
            log::debug!("a reply was not taken: {error}");
        }
    }
}

/// Busy-polls for the next request before sleeping: on a machine with idle CPUs, a wake-up takes
/// longer than most requests. The budget adapts to the success of polling.
struct PollBudget {
    budget: Duration,
    /// Upper bound of the budget.
    max_budget: Duration,
    /// Start of the polling.
    since: Option<Instant>,
}

/// Upper bound of the budget: a little more than a program takes between two requests when it has
/// to be woken itself.
const MAX_POLL_TIME: Duration = Duration::from_micros(100);
/// Interval between looks for forgets while there are some: each look takes all that there are.
const FORGET_INTERVAL: Duration = Duration::from_millis(1);
/// Lower bound of the budget: enough for a request that is there already.
const MIN_POLL_TIME: Duration = Duration::from_micros(2);

impl PollBudget {
    fn new(no_polling: bool) -> Self {
        let max_budget = if no_polling { Duration::ZERO } else { MAX_POLL_TIME };
        Self { budget: max_budget, max_budget, since: None }
    }

    /// Adapts the budget when a request arrives. This includes arrivals after a sleep, or a server
    /// that once gave up polling would sleep between any two requests for ever.
    fn record_arrival(&mut self) {
        let Some(since) = self.since.take() else { return };
        let budget =
            if since.elapsed() <= MAX_POLL_TIME { self.budget * 2 } else { self.budget / 2 };
        self.budget = budget.max(MIN_POLL_TIME).min(self.max_budget);
    }

    /// Returns true if it is too early to sleep.
    fn keeps_polling(&mut self) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        let is_early = since.elapsed() < self.budget;
        if is_early {
            // Let other threads use this CPU first.
            rustix::thread::sched_yield();
        }
        is_early
    }

    /// Returns when there may be a request.
    fn poll_or_sleep(&mut self, fuse: impl AsFd) -> io::Result<()> {
        if self.keeps_polling() {
            return Ok(());
        }
        match poll(&mut [PollFd::new(&fuse, PollFlags::IN)], None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Returns when there may be a forget: shortly after the last one to answer more at once, or
    /// when the kernel has one.
    ///
    /// # Errors
    /// The kernel's error, or that a queue has failed.
    fn wait_for_forgets(&mut self, transport: Transport<'_>) -> io::Result<()> {
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() < FORGET_INTERVAL {
            std::thread::sleep(FORGET_INTERVAL);
            return Ok(());
        }
        let failure = transport.rings.map_or(transport.fuse, RingSet::failure);
        let fds = &mut [&transport.fuse, &failure].map(|fd| PollFd::new(fd, PollFlags::IN));
        match poll(fds, None) {
            Ok(_) if transport.rings.is_some() && !fds[1].revents().is_empty() => {
                Err(io::Error::other("a queue of its ring has failed"))
            }
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poll_budget_adapts_to_arrivals() {
        let mut poll_budget = PollBudget::new(false);
        for _ in 0..20 {
            poll_budget.since = Some(Instant::now() - MAX_POLL_TIME);
            poll_budget.record_arrival();
        }
        assert_eq!((poll_budget.budget, poll_budget.since), (MIN_POLL_TIME, None));
        // With or without a sleep meanwhile.
        for _ in 0..20 {
            poll_budget.since = Some(Instant::now());
            poll_budget.record_arrival();
        }
        assert_eq!((poll_budget.budget, poll_budget.since), (MAX_POLL_TIME, None));
        let mut poll_budget = PollBudget::new(true);
        poll_budget.since = Some(Instant::now());
        poll_budget.record_arrival();
        assert_eq!(poll_budget.budget, Duration::ZERO);
    }
}
