//! Files of a run: `results.json`; `measurements.jsonl`, one measurement per line; and
//! `profile-SUBJECT.json` for each device whose profile was measured.
//!
//! ```text
//!   results.json
//!     schema        1
//!     program       name and version of the program
//!     command       the command line; seed, size, started, seconds, interrupted
//!     machine       machine of the run: see `machine`
//!     stopwatch_ns  cost of one clock read
//!     skipped       [{subject, experiment, needs}]  missing requirements
//!     warnings      [text]
//!     experiments   [{name, paper, asks, finding, command, parameters, figures, subjects,
//!                     points, profiles, found, explains, notes, seconds}]
//!       figures     [{metric, title, x, y, shape}]: how points of that metric are drawn
//!       points      [{metric, subject, series, x, label, median, spread, values, cold}]
//!                   values: one for each repetition, in the unit of the figure's y axis;
//!                   spread: (most - least) / median
//!       profiles    [{subject, profile: {layout, page_bytes, segment_bytes, queue_depth}, why}]
//!                   each also in a file, for `draconis store create --profile FILE`
//!   measurements.jsonl
//!     {experiment, subject, repetition, metric, series, x, label, y, unit, cold}
//! ```

use std::path::Path;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use crate::machine::MachineDescription;
use crate::stats;
use crate::store_profile::StoreProfile;

/// Version of the two file formats.
pub const SCHEMA_VERSION: u32 = 1;

/// Maximum spread that is shown as a percentage; above it, reports show the range.
pub const MAX_PERCENT_SPREAD: f64 = 2.0;
/// Spread above which a point counts as noisy.
pub const NOISY_SPREAD: f64 = 0.2;

/// An axis of a figure.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct FigureAxis {
    /// Label.
    pub label: String,
    /// Unit: `B`, `B/s`, `/s`, `ns`, `%` or empty.
    pub unit: String,
    /// True for a logarithmic axis.
    pub log: bool,
}

/// Form of a figure.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FigureShape {
    /// A line for each series of each subject.
    Lines,
    /// A dot for each point.
    Dots,
    /// A bar for each label.
    Bars,
    /// The series as parts of one bar for each label.
    Stacks,
}

/// Presentation of the points of one metric.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Figure {
    /// Metric of the points.
    pub metric: String,
    /// Title.
    pub title: String,
    /// Horizontal axis.
    pub x: FigureAxis,
    /// Vertical axis.
    pub y: FigureAxis,
    /// Form.
    pub shape: FigureShape,
    /// True if larger values are better; `None` if neither direction is.
    pub more_is_better: Option<bool>,
}

impl Figure {
    /// Creates a figure of `metric` with linear axes.
    pub fn new(shape: FigureShape, metric: &str, title: &str) -> Self {
        let axis = || FigureAxis { label: String::new(), unit: String::new(), log: false };
        let (x, y) = (axis(), axis());
        let (metric, title) = (metric.into(), title.into());
        Self { metric, title, x, y, shape, more_is_better: None }
    }

    /// Sets label and unit of the x axis.
    pub fn with_x_axis(mut self, label: &str, unit: &str) -> Self {
        (self.x.label, self.x.unit) = (label.into(), unit.into());
        self
    }

    /// Sets label and unit of the y axis.
    pub fn with_y_axis(mut self, label: &str, unit: &str) -> Self {
        (self.y.label, self.y.unit) = (label.into(), unit.into());
        self.more_is_better = match unit {
            "B/s" | "/s" => Some(true),
            "ns" => Some(false),
            _ => None,
        };
        self
    }

    /// Makes the x axis logarithmic.
    pub fn with_log_x(mut self) -> Self {
        self.x.log = true;
        self
    }

    /// Makes the y axis logarithmic.
    pub fn with_log_y(mut self) -> Self {
        self.y.log = true;
        self
    }
}

/// One measured value.
#[derive(Clone, PartialEq, Debug)]
pub struct Sample {
    /// Metric, which selects the figure.
    pub metric: &'static str,
    /// Series of the subject.
    pub series: String,
    /// Position on the x axis.
    pub x: f64,
    /// Name of the position, for bars.
    pub label: Option<String>,
    /// The value.
    pub y: f64,
    /// True if the run was cold; `None` if that was not required.
    pub cold: Option<bool>,
}

impl Sample {
    /// Creates a value at a position.
    pub fn at_x(metric: &'static str, series: &str, x: f64, y: f64) -> Self {
        Self { metric, series: series.into(), x, label: None, y, cold: None }
    }

    /// Creates a value with a label.
    pub fn labelled(metric: &'static str, series: &str, label: &str, y: f64) -> Self {
        Self { label: Some(label.into()), ..Self::at_x(metric, series, 0.0, y) }
    }

    /// Sets whether the run was cold.
    pub fn with_cold(mut self, cold: bool) -> Self {
        self.cold = Some(cold);
        self
    }
}

/// All repetitions of a value.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ResultPoint {
    /// Metric, which selects the figure.
    pub metric: String,
    /// Subject.
    pub subject: String,
    /// Series of the subject.
    pub series: String,
    /// Position on the x axis.
    pub x: f64,
    /// Name of the position.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Median of the repetitions.
    pub median: f64,
    /// Range of the repetitions, as a fraction of the median.
    pub spread: f64,
    /// Values of the repetitions.
    pub values: Vec<f64>,
    /// True if all runs were cold; `None` if that was not required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold: Option<bool>,
}

/// A parameter and its value.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct UsedParameter {
    /// Name.
    pub name: String,
    /// Description.
    pub what: String,
    /// Value.
    pub value: String,
}

/// A subject and its description.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SubjectDescription {
    /// Name.
    pub name: String,
    /// Description.
    pub what: String,
}

/// Results of an experiment.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct ExperimentResult {
    /// Name.
    pub name: String,
    /// Paper that the experiment is from.
    pub paper: String,
    /// Question that the experiment answers.
    pub asks: String,
    /// Result published in the paper.
    pub finding: String,
    /// Command that repeats the experiment.
    pub command: String,
    /// Parameters.
    pub parameters: Vec<UsedParameter>,
    /// Figures.
    pub figures: Vec<Figure>,
    /// Subjects.
    pub subjects: Vec<SubjectDescription>,
    /// Measured points.
    pub points: Vec<ResultPoint>,
    /// Recommended store profiles.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub profiles: Vec<StoreProfile>,
    /// Summary in words.
    pub found: Vec<String>,
    /// Reason why results may differ from the paper.
    #[serde(default)]
    pub explains: String,
    /// Notes taken during the run.
    pub notes: Vec<String>,
    /// Duration.
    pub seconds: f64,
}

/// A subject that this machine cannot provide.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SkippedSubject {
    /// Subject.
    pub subject: String,
    /// Experiment.
    pub experiment: String,
    /// Missing requirement.
    pub needs: String,
}

/// Results of a run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Results {
    /// [`SCHEMA_VERSION`].
    pub schema: u32,
    /// Name and version of the program.
    pub program: String,
    /// Command line.
    pub command: String,
    /// Start time.
    pub started: String,
    /// Duration.
    pub seconds: f64,
    /// `quick`, `paper`, or a factor.
    pub size: String,
    /// Random seed.
    pub seed: u64,
    /// True if the run was stopped early.
    pub interrupted: bool,
    /// Machine.
    pub machine: MachineDescription,
    /// Cost of one clock read.
    pub stopwatch_ns: f64,
    /// Skipped subjects.
    pub skipped: Vec<SkippedSubject>,
    /// Warnings about the reliability of the results.
    pub warnings: Vec<String>,
    /// Results of the experiments.
    pub experiments: Vec<ExperimentResult>,
}

impl ExperimentResult {
    /// Adds the samples of one pass over a subject.
    pub fn add_samples(&mut self, subject: &str, samples: &[Sample]) {
        for sample in samples {
            let same = |point: &&mut ResultPoint| {
                point.metric == sample.metric
                    && point.subject == subject
                    && point.series == sample.series
                    && point.x == sample.x
                    && point.label == sample.label
            };
            if let Some(point) = self.points.iter_mut().find(same) {
                point.values.push(sample.y);
                point.cold = point.cold.and_then(|all| Some(all && sample.cold?));
                continue;
            }
            self.points.push(ResultPoint {
                metric: sample.metric.into(),
                subject: subject.into(),
                series: sample.series.clone(),
                x: sample.x,
                label: sample.label.clone(),
                median: 0.0,
                spread: 0.0,
                values: vec![sample.y],
                cold: sample.cold,
            });
        }
    }

    /// Computes medians and spreads.
    pub fn compute_medians_and_spreads(&mut self) {
        for point in &mut self.points {
            point.median = stats::median(&point.values).unwrap_or(0.0);
            point.spread = stats::relative_spread(&point.values);
        }
    }

    /// Returns the points for lookups.
    pub fn points(&self) -> PointQuery<'_> {
        PointQuery(&self.points)
    }

    /// Returns the figure of a metric.
    pub fn figure(&self, metric: &str) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.metric == metric)
    }

    /// Returns the share of noisy points among repeated ones.
    pub fn noisy_share(&self) -> Option<f64> {
        let repeated = || self.points.iter().filter(|point| point.values.len() > 1);
        let noisy = repeated().filter(|point| point.spread > NOISY_SPREAD).count();
        (noisy > 0).then(|| noisy as f64 / repeated().count() as f64)
    }
}

/// Median and range of the repetitions.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ValueRange {
    /// Median.
    pub median: f64,
    /// Minimum.
    pub least: f64,
    /// Maximum.
    pub most: f64,
}

impl ValueRange {
    /// Returns the ratio to `other`; `None` if the ranges of the two overlap, so that the
    /// difference is not significant.
    pub fn significant_ratio(self, other: Self) -> Option<f64> {
        let is_apart = self.least > other.most || other.least > self.most;
        (is_apart && other.median > 0.0).then_some(self.median / other.median)
    }
}

impl ResultPoint {
    /// Returns median and range.
    pub fn range(&self) -> ValueRange {
        ValueRange {
            median: self.median,
            least: self.values.iter().copied().fold(self.median, f64::min),
            most: self.values.iter().copied().fold(self.median, f64::max),
        }
    }
}

/// Points, for lookups.
#[derive(Clone, Copy)]
pub struct PointQuery<'a>(pub &'a [ResultPoint]);

impl<'a> PointQuery<'a> {
    /// Returns all subjects in order of first occurrence.
    pub fn subjects(self) -> Vec<&'a str> {
        unique_in_order(self.0.iter().map(|point| point.subject.as_str()))
    }

    /// Returns the series of a metric and subject.
    pub fn series(self, metric: &str, subject: &str) -> Vec<&'a str> {
        unique_in_order(self.of_metric(metric, subject).map(|point| point.series.as_str()))
    }

    /// Returns the points of a metric and subject.
    pub fn of_metric(self, metric: &str, subject: &str) -> impl Iterator<Item = &'a ResultPoint> {
        let fits =
            move |point: &&'a ResultPoint| point.metric == metric && point.subject == subject;
        self.0.iter().filter(fits)
    }

    /// Returns the positions and medians of a line.
    pub fn medians_by_x(self, metric: &str, subject: &str, series: &str) -> Vec<(f64, f64)> {
        let fits = |point: &&ResultPoint| point.series == series;
        self.of_metric(metric, subject).filter(fits).map(|point| (point.x, point.median)).collect()
    }

    /// Returns the positions and ranges of a line.
    pub fn ranges_by_x(self, metric: &str, subject: &str, series: &str) -> Vec<(f64, ValueRange)> {
        let fits = |point: &&ResultPoint| point.series == series;
        self.of_metric(metric, subject).filter(fits).map(|point| (point.x, point.range())).collect()
    }

    /// Returns the median at a position.
    pub fn median_at(self, metric: &str, subject: &str, series: &str, x: f64) -> Option<f64> {
        let line = self.medians_by_x(metric, subject, series);
        line.iter().find(|(at, _)| *at == x).map(|(_, y)| *y)
    }

    /// Returns the median for a label.
    pub fn median_of_label(
        self,
        metric: &str,
        subject: &str,
        series: &str,
        label: &str,
    ) -> Option<f64> {
        let fits = |p: &&ResultPoint| p.series == series && p.label.as_deref() == Some(label);
        self.of_metric(metric, subject).find(fits).map(|point| point.median)
    }

    /// Returns the range for a label.
    pub fn range_of_label(
        self,
        metric: &str,
        subject: &str,
        series: &str,
        label: &str,
    ) -> Option<ValueRange> {
        let fits = |p: &&ResultPoint| p.series == series && p.label.as_deref() == Some(label);
        self.of_metric(metric, subject).find(fits).map(ResultPoint::range)
    }

    /// Returns the point with the largest value of a line.
    pub fn best_point(self, metric: &str, subject: &str, series: &str) -> Option<(f64, f64)> {
        let line = self.medians_by_x(metric, subject, series);
        line.into_iter().max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Returns the mean of a line.
    pub fn mean_of_medians(self, metric: &str, subject: &str, series: &str) -> Option<f64> {
        let line = self.medians_by_x(metric, subject, series);
        stats::mean(&line.iter().map(|(_, y)| *y).collect::<Vec<_>>())
    }
}

/// Removes duplicates, and keeps the order.
pub fn unique_in_order<'a>(all: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = vec![];
    for one in all {
        if !seen.contains(&one) {
            seen.push(one);
        }
    }
    seen
}

impl Results {
    /// Writes all files into `dir`.
    ///
    /// # Errors
    /// Writing a file fails.
    pub fn write(&self, dir: &Path) -> anyhow::Result<()> {
        std::fs::write(dir.join("results.json"), serde_json::to_vec_pretty(self)?)?;
        let mut lines = String::new();
        for outcome in &self.experiments {
            for point in &outcome.points {
                let unit = outcome.figure(&point.metric).map_or("", |figure| &figure.y.unit);
                for (repetition, y) in point.values.iter().enumerate() {
                    let line = serde_json::json!({
                        "experiment": outcome.name,
                        "subject": point.subject,
                        "repetition": repetition,
                        "metric": point.metric,
                        "series": point.series,
                        "x": point.x,
                        "label": point.label,
                        "y": y,
                        "unit": unit,
                        "cold": point.cold,
                    });
                    lines += &line.to_string();
                    lines.push('\n');
                }
            }
        }
        std::fs::write(dir.join("measurements.jsonl"), lines)?;
        for profile in self.experiments.iter().flat_map(|outcome| &outcome.profiles) {
            let text = serde_json::to_string_pretty(profile)? + "\n";
            std::fs::write(dir.join(profile.file_name()), text)?;
        }
        Ok(())
    }

    /// Reads `results.json`, given by path or directory.
    ///
    /// # Errors
    /// The file is missing, or has another schema version.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let path = if path.is_dir() { path.join("results.json") } else { path.into() };
        let text = std::fs::read(&path).with_context(|| path.display().to_string())?;
        let results: Self = serde_json::from_slice(&text)
            .with_context(|| format!("{} are no results of the lab", path.display()))?;
        if results.schema != SCHEMA_VERSION {
            bail!(
                "{}: schema {}, this program reads {SCHEMA_VERSION}",
                path.display(),
                results.schema
            );
        }
        Ok(results)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_are_grouped_into_points() {
        let mut outcome = ExperimentResult::default();
        for y in [1.0, 3.0, 2.0] {
            outcome.add_samples("mem", &[Sample::at_x("speed", "warm", 4.0, y).with_cold(y < 3.0)]);
        }
        outcome.add_samples("mem", &[Sample::labelled("speed", "warm", "x", 9.0)]);
        outcome.compute_medians_and_spreads();
        assert_eq!(outcome.points.len(), 2);
        assert_eq!(outcome.points().median_at("speed", "mem", "warm", 4.0), Some(2.0));
        assert_eq!(outcome.points[0].cold, Some(false));
        assert_eq!(outcome.noisy_share(), Some(1.0));
        assert_eq!(outcome.points().median_of_label("speed", "mem", "warm", "x"), Some(9.0));
    }
}
