//! Pages written by many threads concurrently.

use std::sync::Arc;

use draconis_device::Extent;
use draconis_testkit::sim::{DeviceTiming, RequestKind as Ask, SimRequest};

use super::{Experiment, ExperimentInfo, PaperSource};
use crate::buffer::AlignedBuffer;
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::subject::{OpenMode, Subject, SubjectKind};
use crate::units;
use draconis_device::Random;

/// See the module.
pub struct ParallelWriteExperiment;

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "parallel",
    paper: PaperSource::Draconis,
    question: "How many writes of a page does the device take in a second from 1 to 32 threads?",
    published_result: "Figure 3: it scales to 8 threads; beyond 16 the disk's limit of 175 thousand a \
              second is reached.",
    caveat: "The paper's disk takes 20 µs for a write alone and 175 thousand a second together, \
               so four writers that did nothing else would fill it (--set host=0). The paper's \
               eight come from the host: its program, kernel and interrupts took as long again for \
               each write, and the model is given a host that does. A file system or a virtual \
               disk adds what it costs to enter and leave, too. A disk that turns does one thing \
               at a time.",
    parameters: &[
        new_parameter("threads", "how many write", "1,2,4,8,16,32", "1,2,4,8,12,16,24,32"),
        new_parameter("block", "size of a write", "4K", "4K"),
        new_parameter("writes", "writes of all threads together", "1000", "100000"),
        new_parameter("area", "bytes that are written all over", "16M", "1G"),
        new_parameter(
            "host",
            "nanoseconds of a host before each write to a model",
            "20000",
            "20000",
        ),
    ],
    subjects: &["file", "dir", "model:ssd", "model:hdd"],
    accepts: |kind| matches!(kind, SubjectKind::Raw | SubjectKind::Directory | SubjectKind::Model),
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for ParallelWriteExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Lines, "rate", "Writes in a second by threads")
                .with_x_axis("threads", "")
                .with_y_axis("writes", "/s")
                .with_log_y(),
        ]
    }

    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        context.number_parameter("area")
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let (block, writes) =
            (context.number_parameter("block")?, context.number_parameter("writes")?);
        let (area, host_ns) =
            (context.number_parameter("area")?, context.number_parameter("host")?);
        if subject.kind() != SubjectKind::Model {
            super::reading::prepare_file(context, &subject.files()?, "area", area)?;
        }
        let mut samples = vec![];
        for threads in context.number_list_parameter("threads")? {
            context.check_not_stopped()?;
            let threads = threads.max(1);
            let load =
                RandomWriteLoad { block, stride: block, offset: 0, area, threads, writes, host_ns };
            let ns = load.run(context, subject)?;
            let rate = load.writes as f64 * 1e9 / ns.max(1) as f64;
            samples.push(Sample::at_x("rate", "", threads as f64, rate));
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let line = points.medians_by_x("rate", subject, "");
            let (useful, rate) = fewest_sufficient_threads(&line)?;
            let (rate, alone) =
                (units::format_in_unit(rate, "/s"), units::format_in_unit(line.first()?.1, "/s"));
            Some(match useful <= 1.0 {
                true => format!("{subject}: one thread has all there is ({alone})."),
                false => format!(
                    "{subject}: scales to {useful:.0} threads ({rate}), from {alone} with one."
                ),
            })
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}

/// Returns the minimum number of threads that reaches 90 % of the best rate, and its rate.
pub fn fewest_sufficient_threads(line: &[(f64, f64)]) -> Option<(f64, f64)> {
    let best = line.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
    line.iter().find(|(_, rate)| *rate >= best * 0.9).copied()
}

/// Warm-up writes to a model, in bytes.
const MODEL_WARM_UP_BYTES: u64 = 64 << 20;

/// Direct writes of blocks to random places.
#[derive(Clone, Copy, Debug)]
pub struct RandomWriteLoad {
    /// Size of a write, in bytes.
    pub block: u64,
    /// Writes begin at multiples of this, in bytes ...
    pub stride: u64,
    /// ... plus this.
    pub offset: u64,
    /// Size of the area that is written, in bytes.
    pub area: u64,
    /// Number of concurrent writers.
    pub threads: u64,
    /// Total number of writes.
    pub writes: u64,
    /// Pause of a thread between two writes to a model, in nanoseconds; a real host takes time
    /// by itself.
    pub host_ns: u64,
}

impl RandomWriteLoad {
    fn random_offset(&self, dice: &mut Random) -> u64 {
        let places = (self.area.saturating_sub(self.offset + self.block) / self.stride + 1).max(1);
        dice.next_below(places) * self.stride + self.offset
    }

    /// Runs the load; returns the duration in the subject's time.
    pub fn run(&self, context: &RunContext, subject: &dyn Subject) -> anyhow::Result<u64> {
        match subject.device_timing() {
            Some(mut timing) => {
                // Enough to fill the model's caches; this costs no real time.
                let writes =
                    self.writes.max((MODEL_WARM_UP_BYTES / self.block).clamp(2000, 20_000));
                let load = Self { writes, ..*self };
                let ns = load.simulate_device_time(&mut *timing, &mut context.new_rng());
                Ok((ns as f64 * self.writes as f64 / writes as f64) as u64)
            }
            None => self.run_threads(context, subject),
        }
    }

    /// Runs real threads on the file `area`.
    fn run_threads(&self, context: &RunContext, subject: &dyn Subject) -> anyhow::Result<u64> {
        let clock = subject.clock();
        let file = subject.files()?.open("area", OpenMode::Direct)?;
        let started = clock.now_ns();
        std::thread::scope(|scope| -> anyhow::Result<()> {
            let one = |nth: u64| {
                let file = Arc::clone(&file);
                let mut dice = Random::new(context.seed ^ (nth << 32) ^ context.repetition);
                let share =
                    self.writes / self.threads + u64::from(nth < self.writes % self.threads);
                scope.spawn(move || -> anyhow::Result<()> {
                    let mut bytes = AlignedBuffer::new(self.block as usize);
                    dice.fill(&mut bytes);
                    (0..share).try_for_each(|_| file.write(self.random_offset(&mut dice), &bytes))
                })
            };
            let all: Vec<_> = (0..self.threads).map(one).collect();
            for one in all {
                one.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
            }
            Ok(())
        })?;
        Ok(clock.now_ns() - started)
    }

    /// Simulates threads in device time: each sends its next request when the last one completes.
    /// The first half fills the device's caches; the result is the duration of the second half,
    /// scaled to all writes.
    fn simulate_device_time(&self, timing: &mut dyn DeviceTiming, dice: &mut Random) -> u64 {
        let all = Self { area: timing.model().len_bytes, ..*self };
        let (mut asked, mut answered, mut half_ns, mut now) = (0, 0, 0, 0);
        let mut done = vec![];
        let total = self.writes * 2;
        // Times at which idle threads send their next request, in order.
        let mut ready = std::collections::VecDeque::from(vec![0; self.threads as usize]);
        while answered < total {
            while asked < total && ready.front().is_some_and(|at| *at <= now) {
                let at = Extent::new(all.random_offset(dice), self.block);
                timing.submit(now, SimRequest { id: asked, kind: Ask::Write, at });
                ready.pop_front();
                asked += 1;
            }
            let host = ready.front().copied().filter(|_| asked < total);
            let Some(next) = host.into_iter().chain(timing.next_event_ns()).min() else { break };
            now = next;
            timing.advance(now, &mut done);
            for _ in done.drain(..) {
                answered += 1;
                ready.push_back(now + self.host_ns);
            }
            if answered <= self.writes {
                half_ns = now;
            }
        }
        now - half_ns
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn fewest_threads_reach_90_percent_of_best_rate() {
        let line = [(1.0, 10.0), (2.0, 20.0), (4.0, 39.0), (8.0, 40.0)];
        assert_eq!(super::fewest_sufficient_threads(&line), Some((4.0, 39.0)));
        assert_eq!(super::fewest_sufficient_threads(&[]), None);
    }
}
