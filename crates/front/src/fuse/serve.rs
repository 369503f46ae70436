//! The kernel's requests, read by one thread at a time and answered where they were read.
//!
//! ```text
//!   leader ─ read ─ reply ─ read ─ reply ─ read fsync ─┐ makes a follower the leader,
//!   follower ······································ leader ┴ read ─ reply ...        and syncs
//! ```
//!
//! On a small machine a second reader costs more in wake-ups than it brings, so there is
//! one, as long as no request waits. A thread that reads one that waits for the disk gives the
//! lead to a follower and answers when the disk has: requests behind it go on, and
//! those that wait for the same share a flush, and a thread: see [`syncs`](super::syncs).

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::Scope;
use std::time::{Duration, Instant};

use draconis_exchange::contract::Refusal;
use draconis_exchange::contract::directory::SyncVolume;
use draconis_exchange::contract::file::{FileServer, Read};
use draconis_exchange::contract::request_log::RequestLog;
use draconis_exchange::contract::tree::Tree;
use draconis_exchange::heap::Block;
use draconis_exchange::injected_fault::{DelayPoint, InjectedFault};
use draconis_exchange::notices::Notices;
use fuse_backend_rs::api::server;
use fuse_backend_rs::transport::{FuseBuf, FuseDevWriter, Reader, Writer};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::activity::Activity;
use super::change::Answer;
use super::decoder::{self, Header, Message, UNIQUE_RESEND};
use super::handler::Handler;
use super::init::Init;
use super::notify::{Notifier, NotifyTask, PageCacheFilter};
use super::open;
use super::replay::PendingReplies;
use super::reply::{self, Reply, ReplyBody};
use super::request::{MAX_IO_BYTES, Request};
use super::sync_batch::{SyncBatcher, SyncRequest};

/// Most threads: all but one may wait for the disk.
const MAX_THREADS: usize = 8;

/// What the kernel is to do by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerOptions {
    /// Check permissions, by owner, mode and ACL, as the mount was told to.
    pub permissions: bool,
    /// Keep what is written for a while. Many small writes become a few; every file that
    /// was written, renamed or unlinked costs a message more, since the kernel keeps its
    /// times, too; and that there is no space is told late.
    pub write_back: bool,
    /// Sleep until there is a request, instead of looking for the next one for a while.
    pub busy_poll: bool,
}

/// Serves a tree to the kernel.
pub struct Server<'a, T: Tree + Sync> {
    pub(super) tree: &'a T,
    options: ServerOptions,
    server: server::Server<Handler<'a, T>>,
    /// Where the kernel may have pages.
    pub(super) pages: PageCacheFilter,
    /// Of what was agreed on: see [`Negotiated`](super::init::Negotiated).
    setxattr_ext: AtomicBool,
    /// What remembers requests for a server that comes after this one.
    pub(super) recorder: Option<&'a dyn RequestLog>,
    /// What servers before this one have done and not answered.
    pub(super) pending_replies: PendingReplies,
    /// Sends the notices for which the kernel may wait.
    notices: Option<&'a Notices>,
}

impl<'a, T: Tree + Sync> Server<'a, T> {
    /// A server of `tree`.
    pub fn new(tree: &'a T, options: ServerOptions) -> Self {
        let server = server::Server::new(Handler::new(tree));
        // Every kernel that a connection could be taken over from has the long form.
        let setxattr_ext = AtomicBool::new(tree.is_writable());
        let (pages, answers) = (PageCacheFilter::default(), PendingReplies::default());
        let (recorder, notices) = (None, None);
        Self {
            tree,
            options,
            server,
            pages,
            setxattr_ext,
            recorder,
            pending_replies: answers,
            notices,
        }
    }

    /// Has requests remembered, and takes over what a server before this one has left.
    pub fn with_recorder(self, recorder: &'a dyn RequestLog) -> Self {
        Self { recorder: Some(recorder), ..self }
    }

    /// Has another process send the notices for which the kernel may wait: see
    /// [`notices`](draconis_exchange::notices).
    pub fn with_notices(self, notices: &'a Notices) -> Self {
        Self { notices: Some(notices), ..self }
    }

    /// Answers requests until the mount ends.
    ///
    /// `fuse` may be fresh or one whose kernel side has been initialised already by
    /// another server of the same tree.
    ///
    /// # Errors
    /// What the kernel says when a request cannot be read.
    pub fn serve(&self, fuse: impl AsFd + Sync, activity: &Activity) -> io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(&fuse)?;
        rustix::fs::fcntl_setfl(&fuse, flags | rustix::fs::OFlags::NONBLOCK)?;
        let (notifier, late) = Notifier::new();
        self.replay_oplog(&fuse);
        let threads_of_mount = LeaderFollowers::new(self, &fuse, activity, &notifier);
        std::thread::scope(|scope| {
            let fuse = &fuse;
            std::thread::Builder::new()
                .name("fuse-late".into())
                .spawn_scoped(scope, move || {
                    late.into_iter().for_each(|late| self.run_deferred(fuse, late))
                })?;
            let served = threads_of_mount.run_thread(scope);
            notifier.close();
            served
        })
    }

    fn run_deferred(&self, fuse: impl AsFd, late: NotifyTask) {
        match late {
            NotifyTask::NotifyThenReply { both, deferred } => {
                let [notice, reply] = *both;
                log_send_error(self.notify(&fuse, &notice, None));
                send_reply(&fuse, &reply);
                if let (Some(recorder), Some(deferred)) = (self.recorder, deferred) {
                    recorder.deferred_done(deferred);
                }
            }
            NotifyTask::CheckOrphan(node) => {
                let recorder = self.recorder.filter(|_| self.is_unused(&fuse, node, None));
                if let Some(recorder) = recorder {
                    recorder.release_orphan(node);
                }
            }
        }
    }

    /// Sends a notice, and returns once the kernel has done what it says, or after `wait`.
    ///
    /// # Errors
    /// What the kernel says; [`Errno::TIMEDOUT`].
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

    /// Answers what is answered here.
    fn answer(&self, link: &Connection<'_>, header: Header, message: Message) {
        let node = header.node;
        let answer = match message {
            Message::Init(init) => self.negotiate(init),
            Message::Open { directory, access } => {
                into_errno_or_enosys(open::open(self.tree, node, access, directory))
            }
            Message::Read(read) => return self.read(link, header, read),
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
            Message::Statx => into_errno(self.attributes(node).map(|it| reply::statx(&it))),
            Message::SyncVolume => {
                into_errno(self.tree.sync_volume(&mut SyncVolume {}).map(|()| ReplyBody::default()))
            }
        };
        link.send_reply(&reply_to(header, answer));
    }

    fn negotiate(&self, init: Init) -> Result<ReplyBody, Errno> {
        let answer = init.negotiate(self.options, self.tree.is_writable());
        let (answer, agreed) = answer.ok_or(Errno::PROTO)?;
        self.setxattr_ext.store(agreed.setxattr_ext, Ordering::Relaxed);
        Ok(answer)
    }

    /// Reads; what the tree lends goes to the kernel from where it is.
    fn read(&self, link: &Connection<'_>, header: Header, read: decoder::Read) {
        let mut request = Read {
            buffer: Block::unallocated(read.len as usize),
            buffer_offset: 0,
            offset: read.offset,
            len: read.len,
            no_atime: read.no_atime && !InjectedFault::NoAtime.is_made(),
        };
        // The kernel asks for no more at once.
        let told = match read.len as usize {
            ..=MAX_IO_BYTES => self.tree.file(header.node).read(&mut request),
            _ => Err(Refusal::Invalid),
        };
        match told.and_then(|len| leading_slices(len, &request.buffer).ok_or(Refusal::Io)) {
            Ok(data) => link.send_data(header.unique, &data),
            Err(why) => link.send_reply(&reply_to(header, Err(why.errno()))),
        }
    }

    /// Whether the kernel sends the long form of `setxattr`.
    pub(super) fn has_setxattr_ext(&self) -> bool {
        self.setxattr_ext.load(Ordering::Relaxed)
    }
}

/// The first `len` bytes of a block, in pieces; `None` if they cannot be lent.
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

/// What a refusal is to the kernel.
pub(super) fn into_errno(answer: Result<ReplyBody, Refusal>) -> Result<ReplyBody, Errno> {
    answer.map_err(Refusal::errno)
}

/// The same for something that a tree may not do at all: the kernel does not ask again.
pub(super) fn into_errno_or_enosys(answer: Result<ReplyBody, Refusal>) -> Result<ReplyBody, Errno> {
    answer.map_err(|why| if why == Refusal::NotSupported { Errno::NOSYS } else { why.errno() })
}

pub(super) fn reply_to(header: Header, answer: Result<ReplyBody, Errno>) -> Reply {
    match answer {
        Ok(answer) => Reply::new(header.unique, 0, answer.as_bytes()),
        Err(errno) => Reply::new(header.unique, errno.raw_os_error(), &[]),
    }
}

/// The ways to the kernel.
pub(super) struct Connection<'l> {
    pub(super) fuse: BorrowedFd<'l>,
    pub(super) notifier: &'l Notifier,
    pub(super) recorder: Option<&'l dyn RequestLog>,
}

impl Connection<'_> {
    /// Sends the answer to a change, after the notices that go with it.
    pub(super) fn deliver(&self, header: Header, answer: Answer) {
        if answer.outdates_attributes {
            self.send_reply(&Reply::invalidate_attributes(header.node));
        }
        let Some(notice) = answer.drop_pages else { return self.send_reply(&answer.reply) };
        let deferred = self.recorder.and_then(|recorder| recorder.defer());
        self.notifier
            .send(NotifyTask::NotifyThenReply { both: Box::new([notice, answer.reply]), deferred });
    }

    fn send_reply(&self, reply: &Reply) {
        send_reply(self.fuse, reply);
    }

    /// Replies with data, where it lies.
    fn send_data(&self, unique: u64, data: &[&[u8]]) {
        let head = Reply::data_header(unique, data.iter().map(|piece| piece.len()).sum());
        let data = data.iter().copied().filter(|piece| !piece.is_empty());
        let parts: Vec<_> = [&head[..]].into_iter().chain(data).map(IoSlice::new).collect();
        log_send_error(rustix::io::writev(self.fuse, &parts).map(drop));
    }
}

/// Writes a reply or a notification of ours.
pub(super) fn send_reply(fuse: impl AsFd, reply: &Reply) {
    log_send_error(rustix::io::write(fuse, reply.as_bytes()).map(drop));
}

/// Whether the kernel took a reply is of no consequence.
fn log_send_error(told: rustix::io::Result<()>) {
    if let Err(error) = told {
        // The request was withdrawn, most often.
        log::debug!("a reply was not taken: {error}");
    }
}

/// The threads of one mount: the leader reads.
pub(super) struct LeaderFollowers<'s, 'a, T: Tree + Sync, F> {
    server: &'s Server<'a, T>,
    fuse: &'s F,
    activity: &'s Activity,
    notifier: &'s Notifier,
    /// Its owner reads.
    leader: Mutex<PollBudget>,
    threads: AtomicUsize,
    /// Threads that wait to become the leader.
    followers: AtomicUsize,
    syncs: SyncBatcher,
}

impl<'s, 'a, T: Tree + Sync, F: AsFd + Sync> LeaderFollowers<'s, 'a, T, F> {
    pub(super) fn new(
        server: &'s Server<'a, T>,
        fuse: &'s F,
        activity: &'s Activity,
        notifier: &'s Notifier,
    ) -> Self {
        let (threads, followers) = (AtomicUsize::new(1), AtomicUsize::new(0));
        let leader = Mutex::new(PollBudget::new(server.options.busy_poll));
        let syncs = SyncBatcher::default();
        Self { server, fuse, activity, notifier, leader, threads, followers, syncs }
    }

    /// What each thread does until the mount ends.
    fn run_thread<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> io::Result<()> {
        let mut request = Request::new();
        loop {
            let mut poll_budget = self.become_leader();
            loop {
                match request.read(self.fuse, self.server.recorder) {
                    // The other end of what is no device was closed.
                    Ok(()) if request.is_empty() => return Ok(()),
                    Ok(()) => {}
                    Err(Errno::AGAIN) => {
                        poll_budget.poll_or_sleep(self.fuse)?;
                        continue;
                    }
                    // Interrupted, or the request was withdrawn before we saw it.
                    Err(Errno::INTR | Errno::NOENT) => continue,
                    // Unmounted, or aborted: the others will see the same.
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
                if let Some(data_only) = header.sync_kind(request.bytes()) {
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
                let away = header.may_block() || self.may_block(header, &request);
                if away && self.ensure_follower(scope) {
                    drop(poll_budget);
                    if header.is_seek() {
                        self.flush_kernel_pages(header, &request);
                    }
                    self.handle_request(header, &mut request);
                    break;
                }
                self.activity.begin();
                self.handle_request(header, &mut request);
                self.activity.end_request();
            }
        }
    }

    /// Sends the pending reply to a request that the kernel sent again, if there is one. The
    /// leader does so: a new request that another leader reads drops all pending replies.
    fn sends_pending_reply(&self, header: Header) -> bool {
        let is_kept =
            header.is_resent() && self.server.pending_replies.send_pending(&self.link(), header);
        if is_kept {
            DelayPoint::Read.pass();
        }
        is_kept
    }

    /// Adds one to the syncs that wait; whether this thread has to see to them.
    fn enqueue_sync(&self, sync: SyncRequest) -> bool {
        DelayPoint::Read.pass();
        let unique = sync.header.unique & !UNIQUE_RESEND;
        match self.server.recorder.filter(|recorder| recorder.is_quarantined(unique)) {
            Some(recorder) => {
                recorder.report_quarantined(sync.header.describe());
                send_reply(self.fuse, &reply_to(sync.header, Err(Errno::IO)));
                false
            }
            None => self.syncs.enqueue(sync),
        }
    }

    /// Answers syncs until none waits.
    fn run_sync_batches(&self) {
        let mut syncs = self.syncs.next_batch(0);
        while let Some(first) = syncs.first() {
            if let Some(recorder) = self.server.recorder {
                recorder.begin_request(first.header.unique & !UNIQUE_RESEND, None);
            }
            let files: Vec<_> = syncs.iter().map(|it| (it.header.node, it.data_only)).collect();
            let done = self.server.tree.sync_files(&files);
            for sync in &syncs {
                send_reply(
                    self.fuse,
                    &reply_to(
                        sync.header,
                        into_errno_or_enosys(done.map(|()| ReplyBody::default())),
                    ),
                );
                self.activity.count_reply();
                DelayPoint::Answered.pass();
            }
            if let Some(recorder) = self.server.recorder {
                recorder.finish_request();
            }
            syncs = self.syncs.next_batch(syncs.len());
        }
    }

    /// Whether it is answered only after others are: pages that the kernel has to give, or files
    /// that it has to forget.
    fn may_block(&self, header: Header, request: &Request) -> bool {
        let tree = self.server.tree;
        tree.is_writable()
            && (header.is_seek() || header.is_mutation(request.bytes()) && tree.is_low_on_space())
    }

    fn become_leader(&self) -> MutexGuard<'_, PollBudget> {
        self.followers.fetch_add(1, Ordering::Relaxed);
        let leader = self.leader.lock().unwrap_or_else(PoisonError::into_inner);
        self.followers.fetch_sub(1, Ordering::Relaxed);
        leader
    }

    /// Finds or starts a follower; returns false if there are too many threads. Only the leader
    /// calls this.
    fn ensure_follower<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> bool {
        if self.followers.load(Ordering::Relaxed) > 0 {
            return true;
        }
        if self.threads.load(Ordering::Relaxed) == MAX_THREADS {
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

    /// The kernel asks where data is without having told us of what it has not written
    /// back yet: it is made to, by another thread's answers, before the question is answered.
    fn flush_kernel_pages(&self, header: Header, request: &Request) {
        if let Some(offset) = decoder::seek_offset(request.bytes()) {
            let notice = Reply::invalidate_pages(header.node, offset, 0);
            log_send_error(self.server.notify(self.fuse, &notice, None));
        }
    }

    /// Works on a request, and remembers it meanwhile.
    fn handle_request(&self, header: Header, request: &mut Request) {
        let Some(recorder) = self.server.recorder else { return self.execute(header, request) };
        let unique = header.unique & !UNIQUE_RESEND;
        DelayPoint::Read.pass();
        if recorder.is_quarantined(unique) {
            recorder.report_quarantined(header.describe());
            return send_reply(
                self.fuse,
                &Reply::new(header.unique, Errno::IO.raw_os_error(), &[]),
            );
        }
        let changes = self.server.tree.is_writable() && header.is_mutation(request.bytes());
        recorder.begin_request(unique, changes.then(|| request.split()));
        self.execute(header, request);
        DelayPoint::Answered.pass();
        recorder.finish_request();
        for node in header.forgotten_nodes(request.bytes()).filter(|node| recorder.is_orphan(*node))
        {
            self.notifier.send(NotifyTask::CheckOrphan(node));
        }
    }

    fn execute(&self, header: Header, request: &mut Request) {
        let server = self.server;
        if header.fills_pages(request.bytes()) {
            server.pages.insert(header.node);
        }
        let link = self.link();
        if header.is_mutation(request.bytes()) {
            let answer = server.apply(header, request);
            if let Some(recorder) = server.recorder {
                recorder.decided(answer.outcome);
            }
            link.deliver(header, answer);
        } else {
            match decoder::decode(header, request.bytes()) {
                Some(message) => server.answer(&link, header, message),
                None => self.handle_with_library(request),
            }
        }
        self.activity.count_reply();
    }

    fn link(&self) -> Connection<'_> {
        let (fuse, recorder) = (self.fuse.as_fd(), self.server.recorder);
        Connection { fuse, notifier: self.notifier, recorder }
    }

    fn handle_with_library(&self, request: &mut Request) {
        let (bytes, reply) = request.as_contiguous();
        let raw = self.fuse.as_fd().as_raw_fd();
        let handled = Reader::from_fuse_buffer(FuseBuf::new(bytes))
            .and_then(|reader| Ok((reader, FuseDevWriter::new(raw, reply)?)))
            .map_err(|error| error.to_string())
            .and_then(|(reader, writer)| {
                let writer = Writer::<'_, ()>::FuseDev(writer);
                let handled = self.server.server.handle_message(reader, writer, None, None);
                handled.map_err(|error| error.to_string())
            });
        if let Err(error) = handled {
            // A reply to a withdrawn request, most often.
            log::debug!("a reply was not taken: {error}");
        }
    }
}

/// Looks for the next request for a while before it sleeps: on a machine with idle CPUs
/// waking up takes longer than most requests do. How long depends on what looking brought.
struct PollBudget {
    /// How long to look, at most.
    budget: Duration,
    /// The longest that is looked.
    max_budget: Duration,
    /// Since when we look.
    since: Option<Instant>,
}

/// The longest that is looked: a little more than a program takes between two requests
/// when it has to be woken itself.
const MAX_POLL: Duration = Duration::from_micros(100);
/// The shortest: a request that is there already is worth that.
const MIN_POLL: Duration = Duration::from_micros(2);

impl PollBudget {
    fn new(no_polling: bool) -> Self {
        let longest = if no_polling { Duration::ZERO } else { MAX_POLL };
        Self { budget: longest, max_budget: longest, since: None }
    }

    /// A request came. Also after a sleep it is said whether looking would have paid, or
    /// a server that once gave looking up would sleep between any two requests for ever.
    fn record_arrival(&mut self) {
        let Some(since) = self.since.take() else { return };
        let budget = if since.elapsed() <= MAX_POLL { self.budget * 2 } else { self.budget / 2 };
        self.budget = budget.max(MIN_POLL).min(self.max_budget);
    }

    /// Returns when there may be a request.
    fn poll_or_sleep(&mut self, fuse: impl AsFd) -> io::Result<()> {
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() < self.budget {
            // Another that wants this CPU goes first.
            rustix::thread::sched_yield();
            return Ok(());
        }
        match poll(&mut [PollFd::new(&fuse, PollFlags::IN)], None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looking_pays_or_is_given_up() {
        let mut poll_budget = PollBudget::new(false);
        for _ in 0..20 {
            poll_budget.since = Some(Instant::now() - MAX_POLL);
            poll_budget.record_arrival();
        }
        assert_eq!((poll_budget.budget, poll_budget.since), (MIN_POLL, None));
        // Whether it slept meanwhile or not.
        for _ in 0..20 {
            poll_budget.since = Some(Instant::now());
            poll_budget.record_arrival();
        }
        assert_eq!((poll_budget.budget, poll_budget.since), (MAX_POLL, None));
        let mut poll_budget = PollBudget::new(true);
        poll_budget.since = Some(Instant::now());
        poll_budget.record_arrival();
        assert_eq!(poll_budget.budget, Duration::ZERO);
    }
}
