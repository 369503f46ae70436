//! Page size of a device, inferred from write times.
//!
//! Figure 1 of the paper shows throughput by block size. The page size shows in the same block at
//! different offsets: a block that begins inside a page touches one page more, and modifies two
//! of them partially.
//!
//! ```text
//!   pages    |       |       |       |       |
//!   aligned  [===============]                 2 pages, whole
//!   not      .    [===============]            3 pages, two of them read before
//! ```

use super::parallel::Load;
use super::{Experiment, ExperimentInfo, Paper};
use crate::context::Context;
use crate::parameters::parameter;
use crate::results::{Figure, Points, Range, Sample, Shape};
use crate::subject::{Kind, Subject};
use crate::units;

/// See the module.
pub struct PageSize;

/// Writes begin at multiples of this, plus an offset.
const STRIDE: u64 = 64 << 10;
/// Size of a write at different offsets: the maximum page size that can be detected.
pub const PROBE: u64 = 16 << 10;
/// Offsets of the writes; 0 is aligned.
pub const OFFSETS: [u64; 6] = [512, 1024, 2048, 4096, 8192, 0];
/// Factor by which a write counts as slower: above noise, and on models, which have none.
const SLOWER: f64 = 1.12;
const SLOWER_ON_MODELS: f64 = 1.04;

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "page-size",
    paper: Paper::Draconis,
    question: "How fast are writes by their size in multiples of 512 bytes, and which page do they \
           betray?",
    published_result: "Figure 1: throughput is much higher with blocks of 4 KB and 8 KB, so the page is 4 \
              KB: whatever is no multiple of it costs a read-modify-write.",
    caveat: "A cache before the flash - of the disk, or of the machine below a virtual one - \
               hides the page: then writes are priced by their number and the curve has no knee. \
               On the models it stands where they have it.",
    parameters: &[
        parameter(
            "sizes",
            "sizes of a write",
            "512,1024,1536,2048,3072,4096,5120,6144,8192",
            "512,1024,1536,2048,2560,3072,3584,4096,4608,5120,5632,6144,6656,7168,7680,8192",
        ),
        parameter("writes", "writes of each size", "200", "5000"),
        parameter("threads", "how many write at the same time (models: at least 64)", "2", "8"),
        parameter("area", "bytes that are written all over", "16M", "1G"),
    ],
    subjects: &["file", "model:ssd", "model:ssd,page=16K"],
    accepts: |kind| matches!(kind, Kind::Raw | Kind::Directory | Kind::Model),
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for PageSize {
    fn about(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(Shape::Lines, "speed", "Write throughput by block size")
                .x("block", "B")
                .y("written", "B/s")
                .log_y(),
            Figure::new(Shape::Bars, "offset", "16 KiB written at an offset: time of a write")
                .y("time for a write", "ns"),
        ]
    }

    fn bytes(&self, context: &Context) -> anyhow::Result<u64> {
        context.number("area")
    }

    fn run(&self, context: &Context, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let area = context.number("area")?;
        if subject.kind() != Kind::Model {
            super::reading::prepare(context, &subject.files()?, "area", area)?;
        }
        let (writes, threads) = (context.number("writes")?, context.number("threads")?);
        let probe = Probe::new(writes, threads, area, subject);
        let mut samples = vec![];
        for size in context.numbers("sizes")? {
            if let Some(ns) = probe.time(context, subject, size, 0) {
                samples.push(Sample::at("speed", "", size as f64, size as f64 * 1e9 / ns));
            } else {
                let name = subject.name();
                context.note(format!("{name}: takes no direct writes of {size} bytes"));
            }
        }
        for (offset, ns) in probe.offsets(context, subject) {
            samples.push(Sample::named("offset", "", &label(offset), ns));
        }
        Ok(samples)
    }

    fn summarize(&self, points: Points<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let (page, inside, aligned) = paged(points, subject)?;
            let shown = units::bytes(page as f64);
            Some(match inside.times(aligned) {
                _ if page <= 512 => format!(
                    "{subject}: 16 KiB cost the same wherever they begin: the page is 512 B, or a \
                     cache hides it."
                ),
                None => format!("{subject}: pages of {shown} and no pages are not told apart."),
                Some(_) => {
                    format!("{subject}: the page is {shown}: what begins inside one costs more.")
                }
            })
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}

/// Returns the page size inferred from a subject's `offset` points.
pub fn page_of(points: Points<'_>, subject: &str) -> Option<u64> {
    let at = |offset: &u64| Some((*offset, points.named("offset", subject, "", &label(*offset))?));
    let slower = if subject.starts_with("model") { SLOWER_ON_MODELS } else { SLOWER };
    infer(&OFFSETS.iter().filter_map(at).collect::<Vec<_>>(), slower)
}

/// Returns the inferred page size, and the times of writes that begin inside a page and of aligned
/// ones. If these times are equal, the page size is unknown.
pub fn paged(points: Points<'_>, subject: &str) -> Option<(u64, Range, Range)> {
    let page = page_of(points, subject)?;
    let at = |offset| points.range("offset", subject, "", &label(offset));
    Some((page, at(page / 2).or_else(|| at(0))?, at(0)?))
}

/// Returns the label of an offset.
pub fn label(offset: u64) -> String {
    if offset == 0 { "aligned".into() } else { format!("at {offset}") }
}

/// Parameters of the writes for detecting the page size.
pub struct Probe {
    area: u64,
    threads: u64,
    writes: u64,
}

impl Probe {
    /// Creates a probe with `writes` writes by `threads` threads.
    pub fn new(writes: u64, threads: u64, area: u64, subject: &dyn Subject) -> Self {
        match subject.kind() {
            // On a model, effects show only once its buffer is full.
            Kind::Model => Self { area, threads: threads.max(64), writes },
            _ => Self { area, threads: threads.max(1), writes },
        }
    }

    /// Returns the nanoseconds per write; `None` if the subject does not support the size.
    fn time(
        &self,
        context: &Context,
        subject: &dyn Subject,
        block: u64,
        offset: u64,
    ) -> Option<f64> {
        let Self { area, threads, writes } = *self;
        let load = Load { block, stride: STRIDE, offset, area, threads, writes, host_ns: 0 };
        let ns = load.run(context, subject).ok()?;
        Some((ns as f64 / writes as f64).max(1.0))
    }

    /// Returns the time of a write at each supported offset.
    pub fn offsets(&self, context: &Context, subject: &dyn Subject) -> Vec<(u64, f64)> {
        let time = |offset: &u64| Some((*offset, self.time(context, subject, PROBE, *offset)?));
        OFFSETS.iter().filter_map(time).collect()
    }
}

/// Infers the page size: the smallest offset at which writes are as fast as aligned ones, if all
/// smaller offsets are slower; 512 if no effect shows.
fn infer(times: &[(u64, f64)], slower: f64) -> Option<u64> {
    let aligned = times.iter().find(|(offset, _)| *offset == 0)?.1;
    let slow = |(_, ns): &&(u64, f64)| *ns > aligned * slower;
    let at_offsets = || times.iter().filter(|(offset, _)| *offset > 0);
    let slow_ones = at_offsets().take_while(slow).count();
    if slow_ones != at_offsets().filter(slow).count() {
        // Noise: with a page, all offsets below it are slow, and none above.
        return Some(512);
    }
    Some(at_offsets().nth(slow_ones).map_or(PROBE, |(offset, _)| *offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_told_from_noise() {
        let page = |slow: [f64; 6]| {
            let times: Vec<(u64, f64)> = OFFSETS.into_iter().zip(slow).collect();
            infer(&times, SLOWER)
        };
        assert_eq!(page([2.0, 2.0, 2.0, 1.0, 1.0, 1.0]), Some(4096));
        assert_eq!(page([2.0, 2.0, 2.0, 2.0, 2.0, 1.0]), Some(16384));
        assert_eq!(page([1.0, 1.0, 1.0, 1.0, 1.0, 1.0]), Some(512));
        assert_eq!(page([2.0, 1.0, 1.0, 1.5, 1.0, 1.0]), Some(512));
        assert_eq!(infer(&[], SLOWER), None);
    }
}
