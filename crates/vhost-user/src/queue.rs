//! A queue: threads that take requests from a ring and carry them out.
//!
//! Law 1: one thread leads: it takes requests from the ring and waits for kicks. If more requests are
//! available, another thread leads while it carries one out; else one that finds it busy for
//! some time. Waking a thread costs more than a short request.
//! Law 2: a queue stops once its requests are answered. Nothing is taken from its ring afterwards.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use draconis_types::lock::{Mutex, RwLock};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use vm_memory::Bytes;

use crate::device::{Device, Outcome};
use crate::error::RingError;
use crate::inflight::Resources;
use crate::lead::{Lead, Term};
use crate::memory::Memory;
use crate::request::Request;
use crate::ring::{Ring, RingLayout};
use crate::{MAX_QUEUE_SIZE, MAX_QUEUE_THREADS};

/// Stack of a thread, in bytes.
const STACK_BYTES: usize = 1 << 20;

/// What the queues of a session share.
pub(crate) struct Shared {
    pub(crate) device: Arc<Device>,
    pub(crate) resources: Arc<Resources>,
    pub(crate) memory: RwLock<Memory>,
    /// True if a write is answered once it is durable.
    pub(crate) is_write_through: AtomicBool,
}

/// Descriptors by which a queue notifies the front end.
#[derive(Default)]
pub(crate) struct Notifiers {
    pub(crate) call: Option<File>,
    pub(crate) error: Option<File>,
}

/// A queue that runs.
pub(crate) struct Queue {
    index: usize,
    shared: Arc<Shared>,
    ring: Mutex<Ring>,
    lead: Lead,
    kick: File,
    notifiers: Arc<Mutex<Notifiers>>,
    is_stopping: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

pub(crate) fn notify(fd: Option<&File>) {
    if let Some(fd) = fd
        && let Err(errno) = rustix::io::write(fd, &1u64.to_ne_bytes())
        // A counter at its maximum wakes, too.
        && errno != Errno::AGAIN
    {
        log::warn!("the front end cannot be notified: {errno}");
    }
}

impl Queue {
    pub(crate) fn start(
        index: usize,
        shared: Arc<Shared>,
        ring: Ring,
        kick: File,
        notifiers: Arc<Mutex<Notifiers>>,
    ) -> std::io::Result<Arc<Self>> {
        let queue = Arc::new(Self {
            index,
            shared,
            ring: Mutex::new(ring),
            lead: Lead::default(),
            kick,
            notifiers,
            is_stopping: AtomicBool::new(false),
            threads: Mutex::new(vec![]),
        });
        queue.start_thread()?;
        // A predecessor may have died before it told of its last entries.
        notify(queue.notifiers.lock().call.as_ref());
        Ok(queue)
    }

    fn start_thread(self: &Arc<Self>) -> std::io::Result<()> {
        let mut threads = self.threads.lock();
        if threads.len() < MAX_QUEUE_THREADS {
            self.lead.add_follower();
            let queue = self.clone();
            let builder = std::thread::Builder::new().name("queue".into()).stack_size(STACK_BYTES);
            threads.push(builder.spawn(move || queue.run())?);
        }
        Ok(())
    }

    /// Takes no more requests, waits for those that are carried out, and returns where another
    /// queue continues.
    pub(crate) fn stop(&self) -> u16 {
        self.is_stopping.store(true, Ordering::SeqCst);
        let Resources { wake_sender, wake_receiver, .. } = &*self.shared.resources;
        let woken = rustix::io::write(wake_sender, &[0]);
        self.lead.stop();
        if woken.is_ok() {
            let _ = (&*wake_receiver).read(&mut [0]);
        }
        loop {
            // A thread may start another one meanwhile.
            let Some(thread) = self.threads.lock().pop() else { break };
            if thread.join().is_err() {
                log::error!("a thread of queue {} panicked", self.index);
            }
        }
        self.ring.lock().next_avail()
    }

    fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::SeqCst)
    }

    fn run(self: &Arc<Self>) {
        let mut term = None;
        let run = AssertUnwindSafe(|| self.run_requests(&mut term));
        let ended = catch_unwind(run).map_err(|_| "a thread panicked".to_owned());
        if let Err(error) = ended.and_then(|ended| ended.map_err(|error| error.to_string())) {
            let text = format!("queue {} is broken and stops: {error}", self.index);
            log::error!("{text}");
            self.shared.device.record_error(text);
            self.is_stopping.store(true, Ordering::SeqCst);
            notify(self.notifiers.lock().error.as_ref());
        }
        self.lead.end(term);
    }

    /// Leads and follows until the queue stops. `term` is the last one of this thread.
    fn run_requests(self: &Arc<Self>, term: &mut Option<Term>) -> Result<(), RingError> {
        let mut is_leader = false;
        loop {
            if !is_leader {
                *term = self.lead.take_over();
            }
            let Some(mine) = *term else { return Ok(()) };
            let Some((memory, mut request, has_more)) = self.wait_for_request()? else {
                return Ok(());
            };
            if self.lead.leave(mine, has_more) == 0
                && let Err(error) = self.start_thread()
            {
                log::warn!("no thread for queue {}: {error}", self.index);
            }
            self.carry_out(&memory, &mut request)?;
            is_leader = self.lead.resume(mine);
        }
    }

    /// Returns the next request, and whether more are available; `None` once the queue stops.
    fn wait_for_request(&self) -> Result<Option<(Memory, Request, bool)>, RingError> {
        loop {
            if self.is_stopping() {
                return Ok(None);
            }
            let memory = self.shared.memory.read().clone();
            let mut ring = self.ring.lock();
            if let Some(chain) = ring.pop(&memory)? {
                ring.disable_kicks(&memory)?;
                let has_more = ring.has_available(&memory);
                drop(ring);
                let request = Request::parse(&memory, chain)?;
                return Ok(Some((memory, request, has_more)));
            }
            if ring.enable_kicks(&memory)? {
                continue;
            }
            drop(ring);
            self.wait_for_kick()?;
        }
    }

    fn wait_for_kick(&self) -> Result<(), RingError> {
        let wake = self.shared.resources.wake_receiver.as_fd();
        let mut waited =
            [PollFd::new(&self.kick, PollFlags::IN), PollFd::new(&wake, PollFlags::IN)];
        match poll(&mut waited, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(RingError::Kick(errno.to_string())),
        }
        let [kick, _] = waited;
        if kick.revents().is_empty() {
            return Ok(());
        }
        match rustix::io::read(&self.kick, &mut [0; 8]) {
            Ok(0) => Err(RingError::Kick("closed".into())),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(errno) => Err(RingError::Kick(errno.to_string())),
        }
    }

    fn carry_out(&self, memory: &Memory, request: &mut Request) -> Result<(), RingError> {
        let is_write_through = self.shared.is_write_through.load(Ordering::SeqCst);
        if answer(&self.shared.device, memory, request, is_write_through, &self.ring)? {
            notify(self.notifiers.lock().call.as_ref());
        }
        Ok(())
    }
}

/// Carries out a request and answers it. Returns true if the guest wants to be notified.
fn answer(
    device: &Device,
    memory: &Memory,
    request: &mut Request,
    is_write_through: bool,
    ring: &Mutex<Ring>,
) -> Result<bool, RingError> {
    match device.execute(memory, request, is_write_through) {
        Outcome::Done(status, written) => {
            memory.write_obj(status as u8, request.status_at)?;
            ring.lock().push(memory, request.head, written.saturating_add(1))
        }
        Outcome::Abandoned => Ok(false),
    }
}

/// Carries out the requests of a ring in guest memory in the calling thread, for tests. Returns their
/// number.
///
/// # Errors
/// See [`RingError`].
pub fn serve_ring_once(
    device: &Device,
    memory: &Arc<vm_memory::GuestMemoryMmap>,
    layout: RingLayout,
) -> Result<usize, RingError> {
    let ring = Mutex::new(Ring::start(memory, layout, 0, true, None)?);
    for count in 0..usize::from(MAX_QUEUE_SIZE) {
        let Some(chain) = ring.lock().pop(memory)? else { return Ok(count) };
        let mut request = Request::parse(memory, chain)?;
        answer(device, memory, &mut request, false, &ring)?;
    }
    Ok(MAX_QUEUE_SIZE.into())
}
