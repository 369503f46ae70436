//! Messages of a worker that was taken over: the lab writes them into the memory that the worker
//! shares, and to its connection.
//!
//! A worker can change its own volume, so only messages are forged that no worker may send. What
//! they would do is known: nothing.

use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use anyhow::{Context, ensure};
use draconis_device::Random;
use draconis_exchange::contract::{Contract, disk::Disk};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::test_mount::process_id;

/// Distance of two mailboxes of a session, and the layout of their first word: see the lanes of
/// `exchange`.
const MAILBOX_STRIDE: u64 = 17 * 128;
const EPOCH: u64 = 1;
/// Lanes of a worker's session: that of the volume, which the worker serves, and those of its disk.
const LANES: u64 = 7;
/// Slot number of a block in the page pool.
const POOL_SLOT: u32 = u32::MAX;
/// Length of the headers of the oplog's memory.
const OPLOG_HEADER_BYTES: u64 = 4096;

/// What a worker shares with its keeper and the kernel.
struct WorkerDescriptors {
    pidfd: OwnedFd,
    /// Memories by length: the session's, then the oplog's.
    memories: Vec<File>,
    event_fds: Vec<i32>,
    fuse: Option<i32>,
}

impl WorkerDescriptors {
    fn of(pid: u32) -> anyhow::Result<Self> {
        let pidfd = pidfd_open(process_id(pid)?, PidfdFlags::empty())?;
        let dir = format!("/proc/{pid}/fd");
        let mut numbers = vec![];
        for entry in std::fs::read_dir(&dir)? {
            numbers.push(entry?.file_name().to_string_lossy().parse::<i32>()?);
        }
        numbers.sort_unstable();
        let (mut memories, mut event_fds, mut fuse) = (vec![], vec![], None);
        for number in numbers {
            let path = format!("{dir}/{number}");
            // Closed meanwhile.
            let Ok(link) = std::fs::read_link(&path) else { continue };
            let link = link.to_string_lossy();
            if link.starts_with("/memfd:draconis-exchange") {
                memories.push(OpenOptions::new().read(true).write(true).open(&path)?);
            } else if link == "anon_inode:[eventfd]" {
                event_fds.push(number);
            } else if link == "/dev/fuse" {
                fuse = Some(number);
            }
        }
        memories.sort_by_key(|memory| memory.metadata().map_or(0, |it| it.len()));
        ensure!(memories.len() == 2, "worker {pid} has {} shared memories", memories.len());
        Ok(Self { pidfd, memories, event_fds, fuse })
    }

    fn duplicate(&self, number: i32) -> anyhow::Result<File> {
        let fd = pidfd_getfd(&self.pidfd, number, PidfdGetfdFlags::empty());
        Ok(fd.context("pidfd_getfd")?.into())
    }
}

/// Sends the keeper a message that the contract does not allow, in the name of the stopped worker
/// `pid`.
pub(super) fn send_forged_message(pid: u32, random: &mut Random) -> anyhow::Result<()> {
    let worker = WorkerDescriptors::of(pid)?;
    let lane = random.next_below(LANES);
    // The worker serves the first lane, and is the client of the others.
    let mailbox = lane * 2 + u64::from(lane == 0);
    let memory = &worker.memories[0];
    let at = mailbox * MAILBOX_STRIDE;
    let mut head = [0; 8];
    memory.read_exact_at(&mut head, at)?;
    let next = (u64::from_le_bytes(head) >> 48) + 1;
    let tag_of = |name| {
        let mut all = Disk::TABLE.messages.iter();
        all.position(|message| message.name == name).unwrap_or_default() as u64
    };
    let mut payload = vec![];
    let (mut sequence, mut tag) = (next, tag_of("Submit"));
    let mut len = 8 + random.next_below(1000);
    match random.next_below(6) {
        // No message has the tag.
        0 => tag = 100 + random.next_below(1000),
        // A message of the other side.
        1 => tag = tag_of("AckSubmit"),
        // Longer than a mailbox.
        2 => len = 4096 + random.next_below(60_000),
        // Out of turn.
        3 => sequence = next + 1 + random.next_below(1000),
        // A block that is not in the pool.
        4 => {
            payload.extend(1_u32.to_le_bytes());
            payload.extend(4096_u64.to_le_bytes());
            for word in [POOL_SLOT, u32::MAX - 511, 512, 1, 1, 0, 0, 0] {
                payload.extend(word.to_le_bytes());
            }
            payload.extend([0, 0]);
            len = payload.len() as u64;
        }
        // Bytes without a meaning. The first ones are the number of blocks, which is too large.
        _ => {
            payload.resize(len as usize, 0);
            random.fill(&mut payload);
            payload[..4].fill(0xff);
        }
    }
    memory.write_all_at(&payload, at + 8)?;
    let head = (sequence & 0xffff) << 48 | EPOCH << 32 | tag << 16 | len & 0xffff;
    memory.write_all_at(&head.to_le_bytes(), at)?;
    let number = worker.event_fds.get(mailbox as usize).context("no event descriptor")?;
    rustix::io::write(worker.duplicate(*number)?, &1_u64.to_ne_bytes())?;
    Ok(())
}

/// Writes replies to the kernel that it must refuse, in the name of the worker `pid`.
pub(super) fn write_forged_replies(pid: u32, random: &mut Random) -> anyhow::Result<()> {
    let worker = WorkerDescriptors::of(pid)?;
    let fuse = worker.duplicate(worker.fuse.context("no connection")?)?;
    let mut reply = |len: u32, bytes: usize, error: i32, unique: u64| {
        let mut reply =
            [&len.to_le_bytes()[..], &error.to_le_bytes(), &unique.to_le_bytes()].concat();
        reply.resize(bytes.max(1), 0);
        let from = reply.len().min(16);
        random.fill(&mut reply[from..]);
        reply
    };
    let forged = [
        // Shorter than its header, longer than it says, and shorter.
        reply(5, 5, 0, 0),
        reply(16, 64, 0, 2),
        reply(4096, 32, 0, 2),
        // A request that does not exist; no error number; no notification.
        reply(16, 16, 0, u64::MAX >> 2),
        reply(16, 16, 77, 2),
        reply(48, 48, 4000, 0),
    ];
    for bytes in forged {
        let written = rustix::io::write(&fuse, &bytes);
        ensure!(written.is_err(), "the kernel took a forged reply of {} bytes", bytes.len());
    }
    Ok(())
}

/// Overwrites a part of the oplog of the stopped worker `pid`: its heads, or entries.
pub(super) fn overwrite_oplog(pid: u32, random: &mut Random) -> anyhow::Result<()> {
    let worker = WorkerDescriptors::of(pid)?;
    let mut bytes = vec![0; 8 << random.next_below(10)];
    random.fill(&mut bytes);
    let at = match random.next_below(2) {
        0 => 8 * random.next_below(8),
        // Entries are aligned; the ring has been used from its beginning on.
        _ => OPLOG_HEADER_BYTES + 64 * random.next_below(256),
    };
    Ok(worker.memories[1].write_all_at(&bytes, at)?)
}
