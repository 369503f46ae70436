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

use super::parallel::RandomWriteLoad;
use super::{Experiment, ExperimentInfo, PaperSource};
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample, ValueRange};
use crate::subject::{Subject, SubjectKind};
use crate::units;

/// See the module.
pub struct PageSizeExperiment;

/// Writes begin at multiples of this, plus an offset.
const WRITE_STRIDE_BYTES: u64 = 64 << 10;
/// Size of a write at different offsets: the maximum page size that can be detected.
pub const PROBE_WRITE_BYTES: u64 = 16 << 10;
/// Offsets of the writes; 0 is aligned.
pub const PROBE_OFFSETS: [u64; 6] = [512, 1024, 2048, 4096, 8192, 0];
/// Factor by which a write counts as slower: above noise, and on models, which have none.
const SLOWER_FACTOR: f64 = 1.12;
const SLOWER_FACTOR_ON_MODELS: f64 = 1.04;

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "page-size",
    paper: PaperSource::Draconis,
    question: "How fast are writes by their size in multiples of 512 bytes, and which page do they \
           betray?",
    published_result: "Figure 1: throughput is much higher with blocks of 4 KB and 8 KB, so the page is 4 \
              KB: whatever is no multiple of it costs a read-modify-write.",
    caveat: "A cache before the flash - of the disk, or of the machine below a virtual one - \
               hides the page: then writes are priced by their number and the curve has no knee. \
               On the models it stands where they have it.",
    parameters: &[
        new_parameter(
            "sizes",
            "sizes of a write",
            "512,1024,1536,2048,3072,4096,5120,6144,8192",
            "512,1024,1536,2048,2560,3072,3584,4096,4608,5120,5632,6144,6656,7168,7680,8192",
        ),
        new_parameter("writes", "writes of each size", "200", "5000"),
        new_parameter("threads", "how many write at the same time (models: at least 64)", "2", "8"),
        new_parameter("area", "bytes that are written all over", "16M", "1G"),
    ],
    subjects: &["file", "model:ssd", "model:ssd,page=16K"],
    accepts: |kind| matches!(kind, SubjectKind::Raw | SubjectKind::Directory | SubjectKind::Model),
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for PageSizeExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Lines, "speed", "Write throughput by block size")
                .with_x_axis("block", "B")
                .with_y_axis("written", "B/s")
                .with_log_y(),
            Figure::new(
                FigureShape::Bars,
                "offset",
                "16 KiB written at an offset: time of a write",
            )
            .with_y_axis("time for a write", "ns"),
        ]
    }

    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        context.number_parameter("area")
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let area = context.number_parameter("area")?;
        if subject.kind() != SubjectKind::Model {
            super::reading::prepare_file(context, &subject.files()?, "area", area)?;
        }
        let (writes, threads) =
            (context.number_parameter("writes")?, context.number_parameter("threads")?);
        let probe = PageSizeProbe::new(writes, threads, area, subject);
        let mut samples = vec![];
        for size in context.number_list_parameter("sizes")? {
            if let Some(ns) = probe.time_writes(context, subject, size, 0) {
                samples.push(Sample::at_x("speed", "", size as f64, size as f64 * 1e9 / ns));
            } else {
                let name = subject.name();
                context.add_note(format!("{name}: takes no direct writes of {size} bytes"));
            }
        }
        for (offset, ns) in probe.time_offsets(context, subject) {
            samples.push(Sample::labelled("offset", "", &offset_label(offset), ns));
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let (page, inside, aligned) = page_size_with_times(points, subject)?;
            let shown = units::format_bytes(page as f64);
            Some(match inside.significant_ratio(aligned) {
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
pub fn inferred_page_size(points: PointQuery<'_>, subject: &str) -> Option<u64> {
    let at = |offset: &u64| {
        Some((*offset, points.median_of_label("offset", subject, "", &offset_label(*offset))?))
    };
    let slower = if subject.starts_with("model") { SLOWER_FACTOR_ON_MODELS } else { SLOWER_FACTOR };
    infer_page_size(&PROBE_OFFSETS.iter().filter_map(at).collect::<Vec<_>>(), slower)
}

/// Returns the inferred page size, and the times of writes that begin inside a page and of aligned
/// ones. If these times are equal, the page size is unknown.
pub fn page_size_with_times(
    points: PointQuery<'_>,
    subject: &str,
) -> Option<(u64, ValueRange, ValueRange)> {
    let page = inferred_page_size(points, subject)?;
    let at = |offset| points.range_of_label("offset", subject, "", &offset_label(offset));
    Some((page, at(page / 2).or_else(|| at(0))?, at(0)?))
}

/// Returns the label of an offset.
pub fn offset_label(offset: u64) -> String {
    if offset == 0 { "aligned".into() } else { format!("at {offset}") }
}

/// Parameters of the writes for detecting the page size.
pub struct PageSizeProbe {
    area: u64,
    threads: u64,
    writes: u64,
}

impl PageSizeProbe {
    /// Creates a probe with `writes` writes by `threads` threads.
    pub fn new(writes: u64, threads: u64, area: u64, subject: &dyn Subject) -> Self {
        match subject.kind() {
            // On a model, effects show only once its buffer is full.
            SubjectKind::Model => Self { area, threads: threads.max(64), writes },
            _ => Self { area, threads: threads.max(1), writes },
        }
    }

    /// Returns the nanoseconds per write; `None` if the subject does not support the size.
    fn time_writes(
        &self,
        context: &RunContext,
        subject: &dyn Subject,
        block: u64,
        offset: u64,
    ) -> Option<f64> {
        let Self { area, threads, writes } = *self;
        let load = RandomWriteLoad {
            block,
            stride: WRITE_STRIDE_BYTES,
            offset,
            area,
            threads,
            writes,
            host_ns: 0,
        };
        let ns = load.run(context, subject).ok()?;
        Some((ns as f64 / writes as f64).max(1.0))
    }

    /// Returns the time of a write at each supported offset.
    pub fn time_offsets(&self, context: &RunContext, subject: &dyn Subject) -> Vec<(u64, f64)> {
        let time = |offset: &u64| {
            Some((*offset, self.time_writes(context, subject, PROBE_WRITE_BYTES, *offset)?))
        };
        PROBE_OFFSETS.iter().filter_map(time).collect()
    }
}

/// Infers the page size: the smallest offset at which writes are as fast as aligned ones, if all
/// smaller offsets are slower; 512 if no effect shows.
fn infer_page_size(times: &[(u64, f64)], slower: f64) -> Option<u64> {
    let aligned = times.iter().find(|(offset, _)| *offset == 0)?.1;
    let slow = |(_, ns): &&(u64, f64)| *ns > aligned * slower;
    let at_offsets = || times.iter().filter(|(offset, _)| *offset > 0);
    let slow_ones = at_offsets().take_while(slow).count();
    if slow_ones != at_offsets().filter(slow).count() {
        // Noise: with a page, all offsets below it are slow, and none above.
        return Some(512);
    }
    Some(at_offsets().nth(slow_ones).map_or(PROBE_WRITE_BYTES, |(offset, _)| *offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_size_is_inferred_despite_noise() {
        let page = |slow: [f64; 6]| {
            let times: Vec<(u64, f64)> = PROBE_OFFSETS.into_iter().zip(slow).collect();
            infer_page_size(&times, SLOWER_FACTOR)
        };
        assert_eq!(page([2.0, 2.0, 2.0, 1.0, 1.0, 1.0]), Some(4096));
        assert_eq!(page([2.0, 2.0, 2.0, 2.0, 2.0, 1.0]), Some(16384));
        assert_eq!(page([1.0, 1.0, 1.0, 1.0, 1.0, 1.0]), Some(512));
        assert_eq!(page([2.0, 1.0, 1.0, 1.5, 1.0, 1.0]), Some(512));
        assert_eq!(infer_page_size(&[], SLOWER_FACTOR), None);
    }
}
