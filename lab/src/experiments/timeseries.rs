//! Consecutive reads, timed one by one: effects that a mean hides.

use super::reading::{ColdCheck, prepare_file, read_all};
use super::{Experiment, ExperimentInfo, PaperSource};
use crate::buffer::AlignedBuffer;
use crate::clock::Stopwatch;
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::stats;
use crate::subject::{OpenMode, Subject, SubjectKind};
use crate::units;

/// See the module.
pub struct TimeSeriesExperiment;

/// Multiple of the median above which a read is slow.
const SLOW_READ_FACTOR: f64 = 2.0;

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "timeseries",
    paper: PaperSource::Singularity,
    question: "How does the speed of one read after the other change along a file, and are slow ones \
           periodic?",
    published_result: "Figure 3 and the slides: most of 200 reads of 16 KB run near 30 MB/s, slower ones \
              come periodically (the head moves to the next track), double spikes are preemption. \
              With 64 MB buffers reads converge to the mean.",
    caveat: "Slow reads come where read-ahead meets the device: one in so many reads waits, the \
               others find their bytes in memory. On model:hdd these are the turns of the platter.",
    parameters: &[
        new_parameter("reads", "reads of each size", "200", "200"),
        new_parameter("buffers", "sizes of a read", "16K,64K", "16K,64K,64M"),
        new_parameter("file", "length of the file; reads stop at its end", "16M", "350M"),
    ],
    subjects: &["kernel:ext2", "draconis", "draconis-lib", "model:hdd"],
    accepts: |kind| kind != SubjectKind::KeyValue,
    repetitions: (1, 1),
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for TimeSeriesExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Dots, "speed", "Speed of each read")
                .with_x_axis("read", "")
                .with_y_axis("read speed", "B/s")
                .with_log_y(),
        ]
    }

    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        context.number_parameter("file")
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let (clock, bytes) = (subject.clock(), context.number_parameter("file")?);
        prepare_file(context, &subject.files()?, "timeseries", bytes)?;
        let mut samples = vec![];
        for buffer in context.number_list_parameter("buffers")? {
            let mut into = AlignedBuffer::new(buffer.min(bytes) as usize);
            let len = into.len() as u64;
            let reads = context.number_parameter("reads")?.min(bytes / len);
            let chill = ColdCheck::empty_caches(subject)?;
            let file = subject.files()?.open("timeseries", OpenMode::Cached)?;
            let mut watch = Stopwatch::start(&*clock);
            let mut laps = Vec::with_capacity(reads as usize);
            for nth in 0..reads {
                context.check_not_stopped()?;
                read_all(&*file, nth * len, &mut into)?;
                laps.push(watch.lap_ns());
            }
            drop(file);
            let cold = chill.was_cold(subject, reads * len);
            let series = units::format_bytes(len as f64);
            samples.extend(laps.iter().enumerate().map(|(nth, ns)| {
                let speed = len as f64 * 1e9 / (*ns).max(1) as f64;
                Sample::at_x("speed", &series, nth as f64, speed).with_cold(cold)
            }));
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let mut found = vec![];
        for subject in points.subjects() {
            for series in points.series("speed", subject) {
                let line = points.medians_by_x("speed", subject, series);
                let speeds: Vec<f64> = line.iter().map(|(_, y)| *y).collect();
                let Some(median) = stats::median(&speeds) else { continue };
                let slow: Vec<f64> = line
                    .iter()
                    .filter(|(_, y)| *y * SLOW_READ_FACTOR < median)
                    .map(|(x, _)| *x)
                    .collect();
                let period = match most_frequent_gap(&slow) {
                    Some(reads) => format!(", most of them {reads:.0} reads apart"),
                    None => String::new(),
                };
                found.push(format!(
                    "{subject}, {series}: median {}, {} of {} reads at less than half of it{period}.",
                    units::format_in_unit(median, "B/s"),
                    slow.len(),
                    line.len(),
                ));
            }
        }
        found
    }
}

/// Returns the most frequent distance between neighbours, if there is one.
fn most_frequent_gap(places: &[f64]) -> Option<f64> {
    let gaps: Vec<f64> = places.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let usual = stats::median(&gaps)?;
    let near = gaps.iter().filter(|gap| (*gap - usual).abs() <= 1.0).count();
    (gaps.len() >= 3 && near * 2 > gaps.len()).then_some(usual)
}

#[cfg(test)]
mod tests {
    #[test]
    fn periodic_slow_reads_are_detected() {
        assert_eq!(super::most_frequent_gap(&[8.0, 16.0, 24.0, 32.0, 41.0]), Some(8.0));
        assert_eq!(super::most_frequent_gap(&[1.0, 2.0, 40.0, 41.0, 90.0, 130.0]), None);
        assert_eq!(super::most_frequent_gap(&[1.0]), None);
    }
}
