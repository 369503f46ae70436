//! A worker's disk: it reads for itself and has others write.
//!
//! ```text
//!   worker: ext ─┬─ read ──────────────▶ its own descriptor, read-only
//!                └─ submit, wait ══════▶ disk service in the manager, the only one to write
//! ```
//!
//! Law: what the worker says to the service is whole or not said; so its death cannot fall
//! between two writes of a group.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use draconis_device::{
    ChainBounds, Disk, Error, Extent, FileDisk, FileOptions, Group, OpenedFile, Pending,
    Properties, ReadAnswer, Refused, RemoteDisk, Ticket, Urgency, serve,
};
use draconis_exchange::channel::process::{Plan, Session};
use draconis_exchange::contract::disk;
use draconis_exchange::heap::Block;
use draconis_exchange::heap::arena::Class;

/// Lanes of the disk contract: one for what is handed over, the others for those who wait.
pub(crate) const LANES: u32 = 6;
/// How long either side waits for the other, which is alive: as long as a disk may take.
/// A death is noticed at once.
const PATIENCE: Duration = Duration::MAX;

/// Adds what a worker that writes needs to the plan of its session, behind its other lanes.
pub(crate) fn plan(plan: &mut Plan) {
    plan.fixed_lanes += LANES;
    plan.guest = vec![
        Class { slot_bytes: 4 << 10, slots: 128 },
        Class { slot_bytes: 64 << 10, slots: 16 },
        Class { slot_bytes: 256 << 10, slots: 8 },
    ];
}

/// Serves the file behind `fd`, open for writing, to the worker of `session` from lane
/// `first` on, until the worker closes or dies.
///
/// # Errors
/// What the system says of the descriptor, or when it has no thread left.
pub(crate) fn serve_disk(
    fd: OwnedFd,
    session: &Arc<Session>,
    first: u32,
) -> std::io::Result<JoinHandle<()>> {
    let how = FileOptions { write: true, direct: true, uring: false };
    let file = OpenedFile::new(fd, how)?.start();
    let lanes = first..first + LANES;
    let ends: Vec<_> = lanes.filter_map(|lane| session.server::<disk::Disk>(lane)).collect();
    std::thread::Builder::new().name("disk".into()).spawn(move || {
        if let Err(lost) = serve(&file, ends, PATIENCE) {
            log::debug!("a worker's disk was closed: {lost}");
        }
        // Dropping the file writes what was taken whole, and gives the claim up.
    })
}

/// The disk as the worker of `session` sees it.
///
/// # Errors
/// When the service does not answer, or there is none.
pub(crate) fn split_disk(
    reads: FileDisk,
    session: &Arc<Session>,
    first: u32,
) -> Result<SplitDisk, Error> {
    let lanes = first..first + LANES;
    let ends: Vec<_> = lanes.filter_map(|lane| session.client::<disk::Disk>(lane)).collect();
    if ends.is_empty() {
        return Err(Error::Gone);
    }
    let blocks = session.clone();
    let writes = RemoteDisk::new(ends, Some(Box::new(move |len| blocks.block(len))), PATIENCE)?;
    Ok(SplitDisk { reads, writes })
}

/// Reads from one disk and writes to another that is the same device.
pub(crate) struct SplitDisk {
    reads: FileDisk,
    writes: RemoteDisk,
}

impl Disk for SplitDisk {
    fn properties(&self) -> Properties {
        let Properties { read_only, atomic, .. } = self.writes.properties();
        Properties { read_only, atomic, ..self.reads.properties() }
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        self.reads.read(at, into, urgency)
    }

    fn chain_bounds(&self) -> ChainBounds {
        self.writes.chain_bounds()
    }

    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        self.writes.submit_chain(chain, after)
    }

    fn settle(&self, ticket: Ticket) -> Result<(), Error> {
        self.writes.settle(ticket)
    }

    fn wait(&self, ticket: Ticket) -> Result<(), Error> {
        self.writes.wait(ticket)
    }
}
