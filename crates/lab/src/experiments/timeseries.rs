//! Consecutive reads, timed one by one: effects that a mean hides.

use super::reading::{ColdCheck, prepare, read_all};
use super::{Experiment, ExperimentInfo, Paper};
use crate::buffer::Buffer;
use crate::clock::Stopwatch;
use crate::context::Context;
use crate::parameters::parameter;
use crate::results::{Figure, Points, Sample, Shape};
use crate::stats;
use crate::subject::{Kind, OpenMode, Subject};
use crate::units;

/// See the module.
pub struct TimeSeries;

/// Multiple of the median above which a read is slow.
const SLOW: f64 = 2.0;

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "timeseries",
    paper: Paper::Singularity,
    question: "How does the speed of one read after the other change along a file, and are slow ones \
           periodic?",
    published_result: "Figure 3 and the slides: most of 200 reads of 16 KB run near 30 MB/s, slower ones \
              come periodically (the head moves to the next track), double spikes are preemption. \
              With 64 MB buffers reads converge to the mean.",
    caveat: "Slow reads come where read-ahead meets the device: one in so many reads waits, the \
               others find their bytes in memory. On model:hdd these are the turns of the platter.",
    parameters: &[
        parameter("reads", "reads of each size", "200", "200"),
        parameter("buffers", "sizes of a read", "16K,64K", "16K,64K,64M"),
        parameter("file", "length of the file; reads stop at its end", "16M", "350M"),
    ],
    subjects: &["kernel:ext2", "draconis", "draconis-lib", "model:hdd"],
    accepts: |kind| kind != Kind::KeyValue,
    repetitions: (1, 1),
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for TimeSeries {
    fn about(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(Shape::Dots, "speed", "Speed of each read")
                .x("read", "")
                .y("read speed", "B/s")
                .log_y(),
        ]
    }

    fn bytes(&self, context: &Context) -> anyhow::Result<u64> {
        context.number("file")
    }

    fn run(&self, context: &Context, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let (clock, bytes) = (subject.clock(), context.number("file")?);
        prepare(context, &subject.files()?, "timeseries", bytes)?;
        let mut samples = vec![];
        for buffer in context.numbers("buffers")? {
            let mut into = Buffer::new(buffer.min(bytes) as usize);
            let len = into.len() as u64;
            let reads = context.number("reads")?.min(bytes / len);
            let chill = ColdCheck::down(subject)?;
            let file = subject.files()?.open("timeseries", OpenMode::Cached)?;
            let mut watch = Stopwatch::start(&*clock);
            let mut laps = Vec::with_capacity(reads as usize);
            for nth in 0..reads {
                context.check()?;
                read_all(&*file, nth * len, &mut into)?;
                laps.push(watch.lap_ns());
            }
            drop(file);
            let cold = chill.was_cold(subject, reads * len);
            let series = units::bytes(len as f64);
            samples.extend(laps.iter().enumerate().map(|(nth, ns)| {
                let speed = len as f64 * 1e9 / (*ns).max(1) as f64;
                Sample::at("speed", &series, nth as f64, speed).cold(cold)
            }));
        }
        Ok(samples)
    }

    fn summarize(&self, points: Points<'_>) -> Vec<String> {
        let mut found = vec![];
        for subject in points.subjects() {
            for series in points.series("speed", subject) {
                let line = points.line("speed", subject, series);
                let speeds: Vec<f64> = line.iter().map(|(_, y)| *y).collect();
                let Some(median) = stats::median(&speeds) else { continue };
                let slow: Vec<f64> =
                    line.iter().filter(|(_, y)| *y * SLOW < median).map(|(x, _)| *x).collect();
                let period = match period(&slow) {
                    Some(reads) => format!(", most of them {reads:.0} reads apart"),
                    None => String::new(),
                };
                found.push(format!(
                    "{subject}, {series}: median {}, {} of {} reads at less than half of it{period}.",
                    units::in_unit(median, "B/s"),
                    slow.len(),
                    line.len(),
                ));
            }
        }
        found
    }
}

/// Returns the most frequent distance between neighbours, if there is one.
fn period(places: &[f64]) -> Option<f64> {
    let gaps: Vec<f64> = places.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let usual = stats::median(&gaps)?;
    let near = gaps.iter().filter(|gap| (*gap - usual).abs() <= 1.0).count();
    (gaps.len() >= 3 && near * 2 > gaps.len()).then_some(usual)
}

#[cfg(test)]
mod tests {
    #[test]
    fn periods_are_found_where_there_are_some() {
        assert_eq!(super::period(&[8.0, 16.0, 24.0, 32.0, 41.0]), Some(8.0));
        assert_eq!(super::period(&[1.0, 2.0, 40.0, 41.0, 90.0, 130.0]), None);
        assert_eq!(super::period(&[1.0]), None);
    }
}
