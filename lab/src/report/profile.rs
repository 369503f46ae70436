//! Results in plain words: ten lines, and recommendations.
//!
//! Law: every sentence is based on a measured number. Differences within the spread of the
//! repetitions lead to no conclusion: the two are "not told apart".

use crate::experiments::{fewest_sufficient_threads, page_size_with_times};
use crate::results::{ExperimentResult, PointQuery, Results, ValueRange};
use crate::units::{format_bytes, format_in_unit, format_significant, format_time_ns};

/// Maximum number of lines of the profile.
const MAX_PROFILE_LINES: usize = 10;
/// Ratio below which seek distance does not matter.
const SEEK_COST_THRESHOLD: f64 = 1.3;

/// Profile and recommendations.
pub struct ProfileText {
    /// Description of the machine's storage.
    pub profile: Vec<String>,
    /// Good, bad and ugly practices.
    pub guidance: Vec<(&'static str, Vec<String>)>,
}

/// Derives the texts from the results.
pub fn profile_text(results: &Results) -> ProfileText {
    let all = ProfileSource { results };
    let profile = [
        all.read_sentence(),
        all.seek_distance_sentence(),
        all.page_size_sentence(),
        all.durable_write_sentence(),
        all.parallel_write_sentence(),
        all.fsync_interval_sentence(),
        all.append_update_sentence(),
        all.competing_fsync_sentence(),
        all.page_fault_sentence(),
        all.call_cost_sentence(),
    ];
    let guidance = vec![
        ("Good: do this", all.good_practices()),
        ("Bad: avoid this", all.bad_practices()),
        ("Ugly: know what it costs", all.ugly_practices()),
    ];
    ProfileText {
        profile: profile.into_iter().flatten().take(MAX_PROFILE_LINES).collect(),
        guidance: guidance.into_iter().filter(|(_, lines)| !lines.is_empty()).collect(),
    }
}

/// Returns `7 times` and the conclusion `then`, or that the two are not told apart.
fn format_ratio(one: ValueRange, other: ValueRange, then: &str) -> String {
    match one.significant_ratio(other) {
        Some(ratio) => format!("{} times{then}", format_significant(ratio)),
        None => "not told apart".into(),
    }
}

/// Returns the point of a line with the best median.
fn best_point(line: &[(f64, ValueRange)]) -> Option<(f64, ValueRange)> {
    let medians: Vec<_> = line.iter().map(|(x, range)| (*x, range.median)).collect();
    let (x, _) = fewest_sufficient_threads(&medians)?;
    line.iter().find(|(at, _)| *at == x).copied()
}

struct ProfileSource<'a> {
    results: &'a Results,
}

impl<'a> ProfileSource<'a> {
    fn outcome(&self, name: &str) -> Option<&'a ExperimentResult> {
        self.results.experiments.iter().find(|outcome| outcome.name == name)
    }

    /// Returns an experiment's points and its first real (not modelled) subject.
    fn real_subject_points(&self, name: &str) -> Option<(PointQuery<'a>, &'a str)> {
        let points = self.outcome(name)?.points();
        let subjects = points.subjects();
        let real = subjects.into_iter().find(|s| !s.starts_with("model") && *s != "delay")?;
        Some((points, real))
    }

    fn request_time(&self, what: &str) -> Option<ValueRange> {
        let (points, subject) = self.real_subject_points("profile")?;
        points.range_of_label("time", subject, "", what)
    }

    /// Returns the best buffer size with its speed, and the smallest size's speed.
    fn best_buffer_size(&self) -> Option<(f64, ValueRange, f64, ValueRange)> {
        let (points, subject) = self.real_subject_points("profile")?;
        let line = points.ranges_by_x("read", subject, "");
        let ((best, speed), (small, slow)) = (best_point(&line)?, *line.first()?);
        Some((best, speed, small, slow))
    }

    fn best_thread_count(&self) -> Option<(f64, ValueRange, ValueRange)> {
        let (points, subject) =
            self.real_subject_points("parallel").or_else(|| self.real_subject_points("profile"))?;
        let line = points.ranges_by_x("rate", subject, "");
        let ((threads, rate), (_, one)) = (best_point(&line)?, *line.first()?);
        Some((threads, rate, one))
    }

    /// Returns throughput by writes per fsync, ascending.
    fn throughput_by_fsync_interval(&self) -> Option<Vec<(f64, ValueRange)>> {
        let outcome = self.outcome("fs-sweep")?;
        let (points, subject) = self.real_subject_points("fs-sweep")?;
        let writes = outcome.parameters.iter().find(|used| used.name == "writes")?;
        let writes = crate::units::parse_amount(&writes.value)? as f64;
        let line = points.ranges_by_x("speed", subject, "");
        let interval = |percent: f64| (percent * writes / 100.0).round().clamp(1.0, writes);
        let line = line.into_iter().map(|(percent, speed)| (interval(percent), speed));
        Some(line.collect::<Vec<_>>()).filter(|line| !line.is_empty())
    }

    fn read_sentence(&self) -> Option<String> {
        let (best, speed, small, slow) = self.best_buffer_size()?;
        Some(format!(
            "Reading past the caches runs at {} with buffers of {}, at {} with {}: {}.",
            format_in_unit(speed.median, "B/s"),
            format_bytes(best),
            format_in_unit(slow.median, "B/s"),
            format_bytes(small),
            format_ratio(speed, slow, ""),
        ))
    }

    fn seek_distance_sentence(&self) -> Option<String> {
        let random = self.request_time("random read 4 KiB")?;
        let sequential = self.request_time("sequential read 4 KiB")?;
        let time = format_time_ns(random.median);
        Some(match random.significant_ratio(sequential) {
            _ if random.median < SEEK_COST_THRESHOLD * sequential.median => format!(
                "A random read of 4 KiB takes {time}, no longer than a sequential one: there \
                     is no head to move."
            ),
            Some(ratio) => format!(
                "A random read of 4 KiB takes {time}, {} times a sequential one.",
                format_significant(ratio)
            ),
            None => format!(
                "A random read of 4 KiB takes {time}, a sequential one {}: not told apart.",
                format_time_ns(sequential.median)
            ),
        })
    }

    /// Returns the page size, and the times of unaligned and aligned writes.
    fn page_size_times(&self) -> Option<(u64, ValueRange, ValueRange)> {
        let (points, subject) = self
            .real_subject_points("page-size")
            .or_else(|| self.real_subject_points("profile"))?;
        page_size_with_times(points, subject)
    }

    fn page_size_sentence(&self) -> Option<String> {
        Some(match self.page_size_times()? {
            (..=512, ..) => {
                "No page shows: writes cost the same wherever they begin, as if a cache \
                             lay before the flash."
                    .into()
            }
            (page, inside, aligned) if inside.significant_ratio(aligned).is_none() => format!(
                "A write that begins inside a page of {} takes {}, an aligned one {}: not told apart.",
                format_bytes(page as f64),
                format_time_ns(inside.median),
                format_time_ns(aligned.median),
            ),
            (page, ..) => format!(
                "The device works in pages of {}: what begins or ends inside one costs more.",
                format_bytes(page as f64)
            ),
        })
    }

    fn durable_write_sentence(&self) -> Option<String> {
        let (durable, plain) =
            (self.request_time("durable write 4 KiB")?, self.request_time("random write 4 KiB")?);
        Some(format!(
            "A write of 4 KiB that is durable takes {}, one that is not {}: {}. That is {} durable \
             ones a second, one after the other.",
            format_time_ns(durable.median),
            format_time_ns(plain.median),
            format_ratio(durable, plain, ""),
            format_in_unit(1e9 / durable.median, "").trim(),
        ))
    }

    fn parallel_write_sentence(&self) -> Option<String> {
        let (threads, rate, one) = self.best_thread_count()?;
        Some(format!(
            "{threads:.0} writes at the same time reach {}, one at a time {}: {}.",
            format_in_unit(rate.median, "/s"),
            format_in_unit(one.median, "/s"),
            format_ratio(rate, one, "; more gain nothing"),
        ))
    }

    fn fsync_interval_sentence(&self) -> Option<String> {
        let line = self.throughput_by_fsync_interval()?;
        let (first, last) = (line.first()?, line.last()?);
        Some(format!(
            "Through the file system, writes of 4 KiB run at {} with an fsync after every {}, at \
             {} without: {}.",
            format_in_unit(first.1.median, "B/s"),
            if first.0 <= 1.0 { "one".into() } else { format!("{:.0}", first.0) },
            format_in_unit(last.1.median, "B/s"),
            format_ratio(last.1, first.1, ""),
        ))
    }

    fn append_and_update_rates(&self) -> Option<(ValueRange, ValueRange)> {
        let (points, subject) = self.real_subject_points("append-update")?;
        let at = |label| points.range_of_label("rate", subject, "", label);
        Some((at("append 4 KiB")?, at("update 4 KiB")?))
    }

    fn append_update_sentence(&self) -> Option<String> {
        let (append, update) = self.append_and_update_rates()?;
        Some(format!(
            "A durable append of 4 KiB is made {}, a durable update in place {}: {}.",
            format_in_unit(append.median, "/s"),
            format_in_unit(update.median, "/s"),
            match update.significant_ratio(append) {
                Some(ratio) if ratio < 1.0 => "growing a file costs no more".into(),
                _ => format_ratio(update, append, " as much where a file grows"),
            },
        ))
    }

    /// Returns the size of the other file, and the times of small fsyncs next to it and alone.
    fn competing_fsync_times(&self) -> Option<(f64, ValueRange, ValueRange)> {
        let (points, subject) = self.real_subject_points("fs-compete")?;
        let line = points.ranges_by_x("time", subject, "");
        let (first, last) = (line.first()?, line.last()?);
        Some((last.0, last.1, first.1))
    }

    fn competing_fsync_sentence(&self) -> Option<String> {
        let (large, beside, alone) = self.competing_fsync_times()?;
        Some(format!(
            "Ten small fsyncs take {} while another file of {} is made durable, alone {}: {}.",
            format_time_ns(beside.median),
            format_bytes(large),
            format_time_ns(alone.median),
            format_ratio(beside, alone, ""),
        ))
    }

    /// Returns the times of random reads in and beyond memory, and that buffer's size.
    fn page_fault_times(&self) -> Option<(ValueRange, ValueRange, f64)> {
        let points = self.outcome("mem-bad")?.points();
        let line = points.ranges_by_x("latency", "mem", "random");
        let (first, last) = (line.first()?, line.last()?);
        Some((first.1, last.1, last.0))
    }

    fn page_fault_sentence(&self) -> Option<String> {
        let (near, far, _) = self.page_fault_times()?;
        Some(format!(
            "A random read of memory takes {}; of a buffer that memory does not hold {}: {}.",
            format_time_ns(near.median),
            format_time_ns(far.median),
            format_ratio(far, near, ""),
        ))
    }

    fn call_cost_sentence(&self) -> Option<String> {
        let points = self.outcome("channel")?.points();
        let at = |series| Some(points.medians_by_x("time", "mem", series).first()?.1);
        Some(format!(
            "A small request costs {} by system call, {} to a thread that looks for it, {} to \
             one that sleeps.",
            format_time_ns(at("system call")?),
            format_time_ns(at("thread, spinning")?),
            format_time_ns(at("thread, sleeping")?),
        ))
    }

    fn good_practices(&self) -> Vec<String> {
        let mut lines = vec![];
        if let Some((best, speed, _, slow)) = self.best_buffer_size()
            && let Some(ratio) = speed.significant_ratio(slow)
        {
            lines.push(format!(
                "Read and write large things with buffers from {} on: {} times the smallest.",
                format_bytes(best),
                format_significant(ratio),
            ));
        }
        if let Some(line) = self.throughput_by_fsync_interval()
            && let (Some((_, least)), Some((_, most))) = (line.first(), line.last())
            && most.significant_ratio(*least).is_some()
            && let Some((interval, _)) =
                line.iter().find(|(_, speed)| speed.median >= most.median / 2.0)
        {
            let last = line.last().is_some_and(|(writes, _)| writes == interval);
            lines.push(if last {
                format!(
                    "Group as many writes as you can before an fsync: even {:.0} of 4 KiB between \
                     two do not reach half of the speed without any.",
                    line.iter().rev().nth(1).map_or(1.0, |(writes, _)| *writes),
                )
            } else {
                format!(
                    "Group writes before an fsync: with {interval:.0} of 4 KiB between two, half \
                     of the speed without any is reached."
                )
            });
        }
        if let Some((threads, rate, one)) = self.best_thread_count()
            && let Some(ratio) = rate.significant_ratio(one)
        {
            lines.push(format!(
                "Keep {threads:.0} requests under way where you have them: {} times one at a time.",
                format_significant(ratio)
            ));
        }
        if self.real_subject_points("profile").is_some() {
            let told = self
                .page_size_times()
                .filter(|(_, inside, aligned)| inside.significant_ratio(*aligned).is_some());
            let page = told.map_or(0, |(page, ..)| page).max(4096);
            lines.push(format!(
                "Write whole multiples of {}, aligned to it.",
                format_bytes(page as f64)
            ));
        }
        lines
    }

    fn bad_practices(&self) -> Vec<String> {
        let mut lines = vec![];
        if let Some(line) = self.throughput_by_fsync_interval()
            && let (Some(first), Some(last)) = (line.first(), line.last())
            && let Some(ratio) = last.1.significant_ratio(first.1)
        {
            lines.push(format!(
                "An fsync after every write: {} times slower than none.",
                format_significant(ratio)
            ));
        }
        if let Some((near, far, buffer)) = self.page_fault_times()
            && let Some(ratio) = far.significant_ratio(near)
        {
            lines.push(format!(
                "Random reads of more than memory holds (here a buffer of {}): {} times slower.",
                format_bytes(buffer),
                format_significant(ratio),
            ));
        }
        if let (Some(random), Some(sequential)) =
            (self.request_time("random read 4 KiB"), self.request_time("sequential read 4 KiB"))
            && let Some(ratio) =
                random.significant_ratio(sequential).filter(|ratio| *ratio >= SEEK_COST_THRESHOLD)
        {
            let ratio = format_significant(ratio);
            lines.push(format!("Small random reads: {ratio} times slower than in sequence."));
        }
        if let Some((large, beside, alone)) = self.competing_fsync_times()
            && let Some(ratio) = beside.significant_ratio(alone).filter(|ratio| *ratio > 2.0)
        {
            lines.push(format!(
                "Large fsyncs beside small ones: {} at once make the small ones {} times slower; \
                 make large files durable piece by piece.",
                format_bytes(large),
                format_significant(ratio),
            ));
        }
        lines
    }

    fn ugly_practices(&self) -> Vec<String> {
        let mut lines = vec![];
        if let Some((points, subject)) = self.real_subject_points("fs-split") {
            let mean = |series| points.mean_of_medians("split", subject, series);
            if let (Some(good), Some(ugly), Some(bad)) = (mean("good"), mean("ugly"), mean("bad")) {
                lines.push(format!(
                    "An fsync now and then (5 %): good : ugly : bad = {} : {} : {} of the \
                     throughput.",
                    format_significant(good),
                    format_significant(ugly),
                    format_significant(bad),
                ));
            }
        }
        if let Some((append, update)) = self.append_and_update_rates()
            && let Some(ratio) = update.significant_ratio(append).filter(|ratio| *ratio > 1.2)
        {
            lines.push(format!(
                "A log that grows with each durable record: {} times slower than one whose space \
                 was written before.",
                format_significant(ratio)
            ));
        }
        if let Some(outcome) = self.outcome("mem-sweep") {
            let line = outcome.points().ranges_by_x("rate", "mem", "");
            if let (Some(first), Some(last)) = (line.first(), line.last())
                && let Some(ratio) = last.1.significant_ratio(first.1)
            {
                lines.push(format!(
                    "Runs from random places of paged memory: with {} reads in a row {} times as \
                     many as with {}.",
                    last.0,
                    format_significant(ratio),
                    first.0,
                ));
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Sample;

    #[test]
    fn unmeasured_topics_have_no_sentence() {
        let mut results = crate::report::tests::empty_results();
        assert!(
            profile_text(&results).profile.is_empty() && profile_text(&results).guidance.is_empty()
        );
        let mut outcome =
            ExperimentResult { name: "parallel".into(), ..ExperimentResult::default() };
        for (threads, rate) in [(1.0, 100.0), (8.0, 700.0), (16.0, 720.0)] {
            outcome.add_samples("model:ssd", &[Sample::at_x("rate", "", threads, rate * 3.0)]);
            outcome.add_samples("file", &[Sample::at_x("rate", "", threads, rate)]);
        }
        outcome.compute_medians_and_spreads();
        results.experiments.push(outcome);
        let words = profile_text(&results);
        assert_eq!(words.profile.len(), 1);
        let said = "8 writes at the same time reach 700/s, one at a time 100/s: 7 times; more";
        assert!(words.profile[0].starts_with(said), "{}", words.profile[0]);
        assert_eq!(words.guidance.len(), 1);
    }

    #[test]
    fn insignificant_differences_give_no_conclusion() {
        let mut results = crate::report::tests::empty_results();
        let mut outcome =
            ExperimentResult { name: "parallel".into(), ..ExperimentResult::default() };
        for rates in [[100.0, 300.0], [90.0, 310.0], [250.0, 320.0]] {
            let at = |threads, rate| Sample::at_x("rate", "", threads, rate);
            outcome.add_samples("file", &[at(1.0, rates[0]), at(8.0, rates[1])]);
        }
        outcome.compute_medians_and_spreads();
        results.experiments.push(outcome);
        assert_eq!(profile_text(&results).guidance.len(), 1);
        for point in &mut results.experiments[0].points {
            point.values[0] = 305.0;
        }
        let words = profile_text(&results);
        assert!(words.profile[0].ends_with(": not told apart."), "{}", words.profile[0]);
        assert!(words.guidance.is_empty());
    }
}
