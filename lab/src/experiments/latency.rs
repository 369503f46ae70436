//! Many reads of one size: latencies, and the cost of pauses.

use super::reading::{prepare_file, read_all};
use super::{Experiment, ExperimentInfo, PaperSource};
use crate::buffer::AlignedBuffer;
use crate::clock::Stopwatch;
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::pin::PinnedThread;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::stats;
use crate::subject::{OpenMode, Subject, SubjectKind};
use crate::units;

/// See the module.
pub struct LatencyExperiment;

/// A latency above this multiple of the median, and at least [`MIN_PAUSE_NS`], is a pause.
const PAUSE_FACTOR: f64 = 20.0;
/// Minimum duration of a pause.
const MIN_PAUSE_NS: f64 = 100_000.0;

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "latency",
    paper: PaperSource::Singularity,
    question: "How long does each of many reads take that are answered from caches, and what do the \
           pauses among them cost?",
    published_result: "Figure 4: of 2000 reads of 16 KB some take about 30 ms, interrupted by the garbage \
              collector. Without them the mean changes by less than 0.1 %; the variance is what \
              they cost.",
    caveat: "There is no garbage collector here. What pauses is the scheduler: another process, \
               or the machine below a virtual one.",
    parameters: &[
        new_parameter("reads", "reads", "2000", "2000"),
        new_parameter("buffer", "size of a read", "16K", "16K"),
        new_parameter("file", "length of the file, read round and round", "8M", "350M"),
    ],
    subjects: &["kernel:ext2", "draconis", "draconis-lib"],
    accepts: |kind| kind != SubjectKind::KeyValue,
    repetitions: (1, 1),
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for LatencyExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Dots, "time", "Response time of each read")
                .with_x_axis("read", "")
                .with_y_axis("response time", "ns")
                .with_log_y(),
        ]
    }

    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        context.number_parameter("file")
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let (clock, bytes) = (subject.clock(), context.number_parameter("file")?);
        let buffer = context.number_parameter("buffer")?.min(bytes);
        prepare_file(context, &subject.files()?, "latency", bytes)?;
        let file = subject.files()?.open("latency", OpenMode::Cached)?;
        let mut into = AlignedBuffer::new(buffer as usize);
        let reads = context.number_parameter("reads")?;
        // Warms exactly the range that is measured: a smaller cache keeps the last reads.
        for nth in 0..(bytes / buffer).min(reads) {
            read_all(&*file, nth * buffer, &mut into)?;
        }
        let pinned = PinnedThread::pin_to_current_cpu();
        if pinned.is_none() {
            context.add_note("not bound to one CPU: the system does not let us");
        }
        let mut laps = Vec::with_capacity(reads as usize);
        let mut watch = Stopwatch::start(&*clock);
        for nth in 0..reads {
            read_all(&*file, nth % (bytes / buffer) * buffer, &mut into)?;
            laps.push(watch.lap_ns());
        }
        drop(pinned);
        let sample = |(nth, ns): (usize, &u64)| Sample::at_x("time", "", nth as f64, *ns as f64);
        Ok(laps.iter().enumerate().map(sample).collect())
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let line = points.medians_by_x("time", subject, "");
            let times: Vec<f64> = line.into_iter().map(|(_, y)| y).collect();
            let (median, mean) = (stats::median(&times)?, stats::mean(&times)?);
            let is_pause = |ns: f64| ns > (median * PAUSE_FACTOR).max(MIN_PAUSE_NS);
            let calm: Vec<f64> = times.iter().copied().filter(|ns| !is_pause(*ns)).collect();
            let longest = times.iter().copied().fold(0.0, f64::max);
            Some(format!(
                "{subject}: median {}, 99th of 100 {}, longest {}; {} pauses, without them the \
                 mean is {:.1} % less.",
                units::format_time_ns(median),
                units::format_time_ns(stats::quantile(&times, 0.99)?),
                units::format_time_ns(longest),
                times.len() - calm.len(),
                (1.0 - stats::mean(&calm)? / mean) * 100.0,
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}
