//! When a modelled device is done: what its clock says, apart from what it holds.

/// What is asked of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Bytes come.
    Read,
    /// Bytes go.
    Write,
    /// Everything written becomes durable.
    Flush,
}

/// One request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// What.
    pub kind: Kind,
    /// First byte.
    pub at_bytes: u64,
    /// How many.
    pub len_bytes: u64,
}

/// A device's sense of time. Requests come in the order of their arrival.
pub trait Timing: Send {
    /// When a request that arrives at `now_ns` is done.
    fn done_ns(&mut self, now_ns: u64, request: Request) -> u64;

    /// Whether distance costs time.
    fn rotational(&self) -> bool;

    /// Its length in bytes.
    fn len_bytes(&self) -> u64;
}

/// A disk that turns: seek by distance, then the turn until the sector comes by. Its write
/// cache is off: done means on the platter.
pub struct Hdd {
    head_bytes: u64,
    free_ns: u64,
}

/// One turn at 7200 per minute.
const TURN_NS: u64 = 8_333_333;
/// Bytes of a track, which pass by in one turn.
const TRACK_BYTES: u64 = 1 << 20;
/// To the next track, and across the whole disk.
const SEEK_NEAR_NS: f64 = 600_000.0;
const SEEK_FAR_NS: f64 = 14_000_000.0;
/// The disks' length.
const DISK_BYTES: u64 = 64 << 30;
/// What a request costs before anything moves.
const COMMAND_NS: u64 = 20_000;

impl Hdd {
    /// With its head at the start.
    pub fn new() -> Self {
        Self { head_bytes: 0, free_ns: 0 }
    }
}

impl Timing for Hdd {
    fn done_ns(&mut self, now_ns: u64, request: Request) -> u64 {
        let start = now_ns.max(self.free_ns) + COMMAND_NS;
        if request.kind == Kind::Flush {
            self.free_ns = start;
            return start;
        }
        let distance = (request.at_bytes / TRACK_BYTES).abs_diff(self.head_bytes / TRACK_BYTES);
        let seek = if distance == 0 {
            0
        } else {
            let part = distance as f64 / (DISK_BYTES / TRACK_BYTES) as f64;
            (SEEK_NEAR_NS + (SEEK_FAR_NS - SEEK_NEAR_NS) * part.sqrt()) as u64
        };
        let there = start + seek;
        // The platter turns whether somebody waits or not.
        let angle = request.at_bytes % TRACK_BYTES * TURN_NS / TRACK_BYTES;
        let turn = (angle + TURN_NS - there % TURN_NS) % TURN_NS;
        let streams = distance == 0 && request.at_bytes == self.head_bytes;
        let reads_on = request.kind == Kind::Read && streams;
        // What follows what was just read is in the disk's own buffer.
        let wait = if reads_on { 0 } else { turn };
        let transfer = request.len_bytes * TURN_NS / TRACK_BYTES;
        self.head_bytes = request.at_bytes + request.len_bytes;
        self.free_ns = there + wait + transfer;
        self.free_ns
    }

    fn rotational(&self) -> bool {
        true
    }

    fn len_bytes(&self) -> u64 {
        DISK_BYTES
    }
}

/// A disk of flash: units that work at the same time; a part of a page costs a whole one,
/// read, changed and written.
pub struct Ssd {
    page_bytes: u64,
    units_free_ns: Vec<u64>,
    next: usize,
}

/// What each step takes inside.
const READ_PAGE_NS: u64 = 60_000;
const PROGRAM_PAGE_NS: u64 = 70_000;
const TRANSFER_NS_PER_KIB: u64 = 400;
const SSD_COMMAND_NS: u64 = 6_000;
const SSD_FLUSH_NS: u64 = 4_000;

impl Ssd {
    /// With pages of `page_bytes` and `units` that work at the same time.
    pub fn new(page_bytes: u64, units: usize) -> Self {
        Self { page_bytes: page_bytes.max(512), units_free_ns: vec![0; units.max(1)], next: 0 }
    }

    /// The unit of a page: writes go wherever there is room, reads where the page is.
    fn unit(&mut self, kind: Kind, page: u64) -> usize {
        let units = self.units_free_ns.len();
        if kind == Kind::Read {
            return (page % units as u64) as usize;
        }
        self.next = (self.next + 1) % units;
        self.next
    }
}

impl Timing for Ssd {
    fn done_ns(&mut self, now_ns: u64, request: Request) -> u64 {
        if request.kind == Kind::Flush {
            return now_ns + SSD_FLUSH_NS;
        }
        let arrived = now_ns + SSD_COMMAND_NS + request.len_bytes * TRANSFER_NS_PER_KIB / 1024;
        let end = request.at_bytes + request.len_bytes;
        let pages = request.at_bytes / self.page_bytes..end.div_ceil(self.page_bytes);
        let mut done = arrived;
        for page in pages {
            let (from, to) = (page * self.page_bytes, (page + 1) * self.page_bytes);
            let whole = request.at_bytes <= from && end >= to;
            let work = match request.kind {
                Kind::Read => READ_PAGE_NS,
                _ if whole => PROGRAM_PAGE_NS,
                _ => READ_PAGE_NS + PROGRAM_PAGE_NS,
            };
            let unit = self.unit(request.kind, page);
            let free = &mut self.units_free_ns[unit];
            *free = (*free).max(arrived) + work;
            done = done.max(*free);
        }
        done
    }

    fn rotational(&self) -> bool {
        false
    }

    fn len_bytes(&self) -> u64 {
        DISK_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(at_bytes: u64, len_bytes: u64) -> Request {
        Request { kind: Kind::Write, at_bytes, len_bytes }
    }

    #[test]
    fn a_turn_passes_between_two_writes_behind_each_other() {
        let mut disk = Hdd::new();
        let first = disk.done_ns(0, write(0, 512));
        let second = disk.done_ns(first, write(512, 512));
        assert!(second - first > TURN_NS - 1_000_000, "{}", second - first);
    }

    #[test]
    fn a_part_of_a_page_costs_more_than_the_page() {
        let part = Ssd::new(4096, 8).done_ns(0, write(0, 512));
        let page = Ssd::new(4096, 8).done_ns(0, write(0, 4096));
        assert!(part > page, "{part} {page}");
    }

    #[test]
    fn units_work_at_the_same_time() {
        let mut disk = Ssd::new(4096, 8);
        let all: Vec<u64> = (0..8).map(|page| disk.done_ns(0, write(page * 4096, 4096))).collect();
        assert!(all.iter().all(|done| *done == all[0]));
        assert!(disk.done_ns(0, write(9 * 4096, 4096)) > all[0]);
    }
}
