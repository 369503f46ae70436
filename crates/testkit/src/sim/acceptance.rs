//! Comparison of the timing models with published figures.
//!
//! Published figures: random reads of a 7200 rpm disk follow from its manual (8.5 ms seek, 4.17 ms
//! half a turn), appends from its 120 turns a second; transfer rates are those of Barracuda XT and
//! ST1000DM010. Reads of the Intel P3700 800 GB were measured by AnandTech (11209, 8104); its
//! specification has a maximum of 450,000 to 460,000 reads a second. For its writes, 20 µs and
//! 175,000 a second are commonly cited, and were not measured here. A row without a published
//! figure is informative only.

use std::sync::Arc;

use draconis_types::Block;

use super::{Hdd, HddParameters, SimDisk, Ssd, SsdParameters};
use draconis_device::Random;
use draconis_device::{Disk, Extent, Group, Pending, Ticket, Urgency, Write};

/// A figure of a model and the published one.
#[derive(Clone, PartialEq, Debug)]
pub struct ModelFigure {
    /// Device and workload.
    pub name: &'static str,
    /// Range of the published figure, if there is one.
    pub published: Option<(f64, f64)>,
    /// Figure of the model, in virtual time.
    pub measured: f64,
    /// Unit of both.
    pub unit: &'static str,
}

impl ModelFigure {
    /// Returns true if the measured figure is within `part` of the published one, or there is none.
    pub fn is_within(&self, part: f64) -> bool {
        self.published.is_none_or(|(low, high)| {
            (low * (1.0 - part)..=high * (1.0 + part)).contains(&self.measured)
        })
    }
}

impl std::fmt::Display for ModelFigure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let published = match self.published {
            None => "-".into(),
            Some((low, high)) if low == high => format!("{low}"),
            Some((low, f64::INFINITY)) => format!("over {low}"),
            Some((low, high)) => format!("{low} to {high}"),
        };
        let Self { name, measured, unit, .. } = self;
        write!(f, "{name:<52} {published:>12} {measured:>12.1} {unit}")
    }
}

/// Length of the measured flash disks: short, so that they reach a steady state soon.
const SSD_BYTES: u64 = 256 << 20;
const SEED: u64 = 1;

/// Measures both models, in virtual time; takes a second or two of real time.
pub fn measure_models() -> Vec<ModelFigure> {
    let mut rows = measure_hdd();
    rows.extend(measure_ssd());
    rows
}

fn model_figure(
    name: &'static str,
    published: &[f64],
    measured: f64,
    unit: &'static str,
) -> ModelFigure {
    let published = published.first().copied().zip(published.last().copied());
    ModelFigure { name, published, measured, unit }
}

fn measure_hdd() -> Vec<ModelFigure> {
    let fresh = |volatile_cache| {
        let parameters = HddParameters::desktop_7200(1_000_000_000_000);
        Workload::new(Hdd::new(HddParameters { volatile_cache, seed: SEED, ..parameters }))
    };
    let outer = Extent::new(0, 64 << 20);
    let inner = Extent::new(999 * 1_000_000_000 / 4096 * 4096, 64 << 20);
    vec![
        model_figure(
            "disk: random 4 KiB reads, depth 1",
            &[80.0],
            fresh(true).random_reads(4096, 1, 2000).0,
            "/s",
        ),
        model_figure(
            "disk: random 4 KiB reads, depth 32",
            &[],
            fresh(true).random_reads(4096, 32, 4000).0,
            "/s",
        ),
        model_figure(
            "disk: 4 KiB appends, flushed",
            &[120.0],
            fresh(true).synchronous_appends(4096, 500).0,
            "/s",
        ),
        model_figure(
            "disk: 4 KiB appends, no cache",
            &[120.0],
            fresh(false).synchronous_appends(4096, 500).0,
            "/s",
        ),
        model_figure(
            "disk: outer reads in order",
            &[138.0, 210.0],
            fresh(true).sequential_throughput(outer, false),
            "MB/s",
        ),
        model_figure(
            "disk: outer writes in order",
            &[138.0, 210.0],
            fresh(true).sequential_throughput(outer, true),
            "MB/s",
        ),
        model_figure(
            "disk: inner reads in order",
            &[],
            fresh(true).sequential_throughput(inner, false),
            "MB/s",
        ),
        model_figure(
            "disk: 20,000 random 4 KiB writes and a flush",
            &[],
            fresh(true).random_writes(4096, 32, 20_000).0,
            "/s",
        ),
    ]
}

fn measure_ssd() -> Vec<ModelFigure> {
    let parameters = SsdParameters { seed: SEED, ..SsdParameters::p3700(SSD_BYTES) };
    // Every measurement below starts with a copy of one worn disk.
    let worn = Ssd::preconditioned(parameters);
    let fresh = || Workload::new(worn.clone());
    let (one, one_us) = fresh().random_reads(4096, 1, 4000);
    let (many, many_us) = fresh().random_reads(4096, 16, 40_000);
    let new = || Workload::new(Ssd::new(parameters));
    let half = Extent::new(0, SSD_BYTES / 2);
    let (steady, amplification) = fresh().steady_state_random_writes(4096);
    vec![
        model_figure("P3700: 4 KiB reads, depth 1", &[12_800.0], one, "/s"),
        model_figure("P3700: 4 KiB reads, depth 1, each", &[77.9], one_us, "us"),
        model_figure("P3700: 4 KiB reads, depth 16", &[167_200.0], many, "/s"),
        model_figure("P3700: 4 KiB reads, depth 16, each", &[93.9], many_us, "us"),
        model_figure(
            "P3700: 4 KiB reads, depth 256",
            &[450_000.0, 460_000.0],
            fresh().random_reads(4096, 256, 100_000).0,
            "/s",
        ),
        model_figure(
            "P3700: 4 KiB writes, depth 1, each",
            &[20.0],
            fresh().synchronous_appends(4096, 2000).1,
            "us",
        ),
        model_figure("P3700: 4 KiB random writes, steady", &[175_000.0], steady, "/s"),
        model_figure("P3700: write amplification in that", &[], amplification, ""),
        model_figure(
            "P3700: 4 KiB random writes, new",
            &[],
            new().steady_state_random_writes(4096).0,
            "/s",
        ),
        model_figure(
            "P3700: 512 B random writes, steady",
            &[],
            fresh().steady_state_random_writes(512).0,
            "/s",
        ),
        model_figure(
            "P3700: smallest random write at full rate",
            &[4096.0],
            f64::from(smallest_efficient_write_bytes(&worn)),
            "bytes",
        ),
        model_figure(
            "P3700: 512 B appends, flushed, each",
            &[],
            fresh().synchronous_appends(512, 2000).1,
            "us",
        ),
        model_figure(
            "P3700: reads in order, 128 KiB, depth 1",
            &[1000.0, f64::INFINITY],
            new().with_filled_range(half).sequential_throughput(half, false),
            "MB/s",
        ),
        model_figure(
            "P3700: reads in order, 128 KiB, depth 32",
            &[2200.0, 2800.0],
            new().with_filled_range(half).random_reads(128 << 10, 32, 8000).0 * 0.131_072,
            "MB/s",
        ),
        model_figure(
            "P3700: writes in order, 1 MiB, depth 4, new",
            &[],
            new().sequential_throughput(half, true),
            "MB/s",
        ),
    ]
}

/// Returns the smallest random write with nearly the throughput of larger ones, in bytes.
fn smallest_efficient_write_bytes(worn: &Ssd) -> u32 {
    let rate = |bytes: u32| {
        let load = Workload::new(worn.clone());
        load.steady_state_random_writes(u64::from(bytes)).0 * f64::from(bytes)
    };
    let sizes = [512, 1024, 2048, 4096, 8192, 16384];
    let rates = sizes.map(rate);
    let best = rates.iter().copied().fold(0.0, f64::max);
    sizes.into_iter().zip(rates).find(|(_, rate)| *rate > 0.8 * best).map_or(0, |(size, _)| size)
}

/// A disk and its workload.
struct Workload {
    disk: Arc<SimDisk>,
    dice: Random,
    /// Start time, and the used part of the disk.
    begin_s: f64,
    len_bytes: u64,
}

impl Workload {
    fn new(timing: impl super::DeviceTiming + 'static) -> Self {
        let len_bytes = timing.model().len_bytes;
        let disk = SimDisk::new(timing, &super::Clock::new());
        Self { disk, dice: Random::new(SEED), begin_s: 0.0, len_bytes }
    }

    fn now_s(&self) -> f64 {
        self.disk.clock().now_ns() as f64 / 1e9 - self.begin_s
    }

    fn random_extent(&mut self, bytes: u64) -> Extent {
        let places = self.len_bytes / bytes;
        Extent::new(self.dice.next_below(places) * bytes, bytes)
    }

    /// Random reads at a queue depth: reads per second, and µs per read.
    fn random_reads(mut self, bytes: u64, depth: usize, count: usize) -> (f64, f64) {
        let mut flying: Vec<(f64, Pending<_>)> = vec![];
        let (mut done, mut waited_s) = (0, 0.0);
        while done < count {
            while flying.len() < depth {
                let at = self.random_extent(bytes);
                let block = Block::private(bytes as usize);
                flying.push((self.now_s(), self.disk.read(at, block, Urgency::Ahead)));
            }
            self.disk.step();
            let now_s = self.now_s();
            flying.retain(|(since_s, answer)| {
                let ready = answer.is_ready();
                if ready {
                    done += 1;
                    waited_s += now_s - since_s;
                }
                !ready
            });
        }
        (done as f64 / self.now_s(), waited_s / done as f64 * 1e6)
    }

    fn submit(&self, at: Extent) -> Ticket {
        let block = Block::private(at.len_bytes as usize);
        let group = Group { writes: vec![Write { at_bytes: at.start_bytes, block }] };
        self.disk.submit(group, &[]).expect("a disk that takes every write")
    }

    /// Random writes at a queue depth without waiting for flushes: writes per second, and µs per
    /// write.
    fn random_writes(mut self, bytes: u64, depth: usize, count: usize) -> (f64, f64) {
        let mut flying = std::collections::VecDeque::new();
        for _ in 0..count {
            let at = self.random_extent(bytes);
            flying.push_back(self.submit(at));
            if flying.len() >= depth
                && let Some(oldest) = flying.pop_front()
            {
                let _ = self.disk.wait_visible(oldest);
            }
        }
        flying.back().map(|last| self.disk.wait_durable(*last));
        let took_s = self.now_s();
        (count as f64 / took_s, took_s / count as f64 * 1e6)
    }

    /// Random writes until the steady state: writes per second, and write amplification.
    fn steady_state_random_writes(mut self, bytes: u64) -> (f64, f64) {
        let count = (self.len_bytes / 4 / bytes.max(4096)) as usize;
        let mut flying = std::collections::VecDeque::new();
        let mut begin = (0.0, self.disk.statistics());
        for nth in 0..2 * count {
            if nth == count {
                begin = (self.now_s(), self.disk.statistics());
            }
            let at = self.random_extent(bytes);
            flying.push_back(self.submit(at));
            if flying.len() >= 128
                && let Some(oldest) = flying.pop_front()
            {
                let _ = self.disk.wait_visible(oldest);
            }
        }
        let (took_s, after) = (self.now_s() - begin.0, self.disk.statistics());
        let programmed = after.work.programmed_bytes - begin.1.work.programmed_bytes;
        (count as f64 / took_s, programmed as f64 / (count as u64 * bytes) as f64)
    }

    /// Sequential writes, each waited for: writes per second, and µs per write.
    fn synchronous_appends(self, bytes: u64, count: u64) -> (f64, f64) {
        // The first write has to seek.
        let mut begin_s = 0.0;
        for nth in 0..=count {
            let ticket = self.submit(Extent::new((1 << 20) + nth * bytes, bytes));
            let _ = self.disk.wait_durable(ticket);
            if nth == 0 {
                begin_s = self.now_s();
            }
        }
        let took_s = self.now_s() - begin_s;
        (count as f64 / took_s, took_s / count as f64 * 1e6)
    }

    /// Writes `within` from start to end, then idles the disk.
    fn with_filled_range(self, within: Extent) -> Self {
        for at in (within.start_bytes..within.start_bytes + within.len_bytes).step_by(1 << 20) {
            self.submit(Extent::new(at, 1 << 20));
        }
        self.disk.run_until_idle();
        Self { begin_s: self.begin_s + self.now_s(), len_bytes: within.len_bytes, ..self }
    }

    /// Reads or writes `within` sequentially: MB/s.
    fn sequential_throughput(self, within: Extent, writes: bool) -> f64 {
        let step = if writes { 1 << 20 } else { 128 << 10 };
        let places = (within.start_bytes..within.start_bytes + within.len_bytes).step_by(step);
        let mut tickets = vec![];
        for start in places {
            let at = Extent::new(start, step as u64);
            if !writes {
                let _ = self.disk.read_now(at, Block::private(step));
                continue;
            }
            tickets.push(self.submit(at));
            if let Some(before) = tickets.len().checked_sub(4) {
                let _ = self.disk.wait_visible(tickets[before]);
            }
        }
        tickets.last().map(|last| self.disk.wait_durable(*last));
        within.len_bytes as f64 / self.now_s() / 1e6
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_figures_are_within_ten_percent() {
        let rows = measure_models();
        let table: Vec<_> = rows.iter().map(ModelFigure::to_string).collect();
        assert!(rows.iter().all(|row| row.is_within(0.1)), "\n{}", table.join("\n"));
    }

    #[test]
    fn short_model_disks_have_same_figures() {
        for len_bytes in [64 << 20, 768 << 20] {
            let worn = Ssd::preconditioned(SsdParameters::p3700(len_bytes));
            let (per_s, amplification) =
                Workload::new(worn.clone()).steady_state_random_writes(4096);
            assert!((157_500.0..192_500.0).contains(&per_s), "{len_bytes}: {per_s}");
            assert!((2.1..2.6).contains(&amplification), "{len_bytes}: {amplification}");
            let (per_s, _) = Workload::new(worn).random_reads(4096, 16, 20_000);
            assert!((150_000.0..184_000.0).contains(&per_s), "{len_bytes}: {per_s}");
        }
        for len_bytes in [64 << 20, 20 << 30, 4 << 40] {
            let disk = || Workload::new(Hdd::desktop_7200(len_bytes));
            // A short disk is soon entirely cached.
            let (per_s, _) = disk().random_reads(4096, 1, 40);
            assert!((68.0..96.0).contains(&per_s), "{len_bytes}: {per_s}");
            let (per_s, _) = disk().synchronous_appends(4096, 100);
            assert!((115.0..121.0).contains(&per_s), "{len_bytes}: {per_s}");
            let rate = disk().sequential_throughput(Extent::new(0, 16 << 20), false);
            assert!((138.0..210.0).contains(&rate), "{len_bytes}: {rate}");
        }
    }

    #[test]
    fn efficient_write_size_is_flash_page() {
        let parameters = SsdParameters { page_bytes: 16 << 10, ..SsdParameters::p3700(64 << 20) };
        assert_eq!(smallest_efficient_write_bytes(&Ssd::preconditioned(parameters)), 16 << 10);
    }
}
