//! What a run leaves: `results.json` and, one line each, `measurements.jsonl`; of each device
//! whose profile was measured `profile-SUBJECT.json`.
//!
//! ```text
//!   results.json
//!     schema        1
//!     program       name and version of what measured
//!     command       the command line; seed, size, started, seconds, interrupted
//!     machine       what it was measured on: see `machine`
//!     stopwatch_ns  what one look at the clock cost
//!     skipped       [{subject, experiment, needs}]  what this machine could not give
//!     warnings      [text]
//!     experiments   [{name, paper, asks, finding, command, parameters, figures, subjects,
//!                     points, profiles, found, explains, notes, seconds}]
//!       figures     [{metric, title, x, y, shape}]: how points of that metric are drawn
//!       points      [{metric, subject, series, x, label, median, spread, values, cold}]
//!                   values: one for each repetition, in the unit of the figure's y axis;
//!                   spread: (most - least) / median
//!       profiles    [{subject, profile: {layout, page_bytes, segment_bytes, queue_depth}, why}]
//!                   each is also a file of its own: `draconis store create --profile FILE`
//!   measurements.jsonl
//!     {experiment, subject, repetition, metric, series, x, label, y, unit, cold}
//! ```

use std::path::Path;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::stats;
use crate::store_profile::StoreProfile;

/// The version of the two files.
pub const SCHEMA: u32 = 1;

/// A spread above which the least and the largest value say more than a percentage.
pub const MOST_SPREAD: f64 = 2.0;
/// A spread above which a point is called noisy.
pub const NOISY: f64 = 0.2;

/// One axis of a figure.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Axis {
    /// What it shows.
    pub label: String,
    /// `B`, `B/s`, `/s`, `ns`, `%` or nothing.
    pub unit: String,
    /// Whether it is logarithmic.
    pub log: bool,
}

/// How a figure is drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    /// A line for each series of each subject.
    Lines,
    /// A dot for each point.
    Dots,
    /// A bar for each label.
    Bars,
    /// The series as parts of one bar for each label.
    Stacks,
}

/// How the points of one metric are shown.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Figure {
    /// Of which points.
    pub metric: String,
    /// What it shows.
    pub title: String,
    /// Along.
    pub x: Axis,
    /// Up.
    pub y: Axis,
    /// How it is drawn.
    pub shape: Shape,
    /// Whether more is better; nothing if neither is.
    pub more_is_better: Option<bool>,
}

impl Figure {
    /// A figure of `metric` with linear axes.
    pub fn new(shape: Shape, metric: &str, title: &str) -> Self {
        let axis = || Axis { label: String::new(), unit: String::new(), log: false };
        let (x, y) = (axis(), axis());
        let (metric, title) = (metric.into(), title.into());
        Self { metric, title, x, y, shape, more_is_better: None }
    }

    /// Names the axis along.
    pub fn x(mut self, label: &str, unit: &str) -> Self {
        (self.x.label, self.x.unit) = (label.into(), unit.into());
        self
    }

    /// Names the axis up.
    pub fn y(mut self, label: &str, unit: &str) -> Self {
        (self.y.label, self.y.unit) = (label.into(), unit.into());
        self.more_is_better = match unit {
            "B/s" | "/s" => Some(true),
            "ns" => Some(false),
            _ => None,
        };
        self
    }

    /// Makes the axis along logarithmic.
    pub fn log_x(mut self) -> Self {
        self.x.log = true;
        self
    }

    /// Makes the axis up logarithmic.
    pub fn log_y(mut self) -> Self {
        self.y.log = true;
        self
    }
}

/// One measured value.
#[derive(Clone, PartialEq, Debug)]
pub struct Sample {
    /// Which figure it belongs to.
    pub metric: &'static str,
    /// Which line of a subject.
    pub series: String,
    /// Where along.
    pub x: f64,
    /// What that place is called, for bars.
    pub label: Option<String>,
    /// The value.
    pub y: f64,
    /// Whether it was cold, if it was to be.
    pub cold: Option<bool>,
}

impl Sample {
    /// A value at a place.
    pub fn at(metric: &'static str, series: &str, x: f64, y: f64) -> Self {
        Self { metric, series: series.into(), x, label: None, y, cold: None }
    }

    /// A value with a name.
    pub fn named(metric: &'static str, series: &str, label: &str, y: f64) -> Self {
        Self { label: Some(label.into()), ..Self::at(metric, series, 0.0, y) }
    }

    /// Says whether it was cold.
    pub fn cold(mut self, cold: bool) -> Self {
        self.cold = Some(cold);
        self
    }
}

/// All repetitions of one value.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Point {
    /// Which figure it belongs to.
    pub metric: String,
    /// What was measured.
    pub subject: String,
    /// Which line of that.
    pub series: String,
    /// Where along.
    pub x: f64,
    /// What that place is called.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// The median of the repetitions.
    pub median: f64,
    /// How far they lie apart, as a part of the median.
    pub spread: f64,
    /// Each.
    pub values: Vec<f64>,
    /// Whether all were cold, if they were to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold: Option<bool>,
}

/// A parameter and the value it had.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Used {
    /// Its name.
    pub name: String,
    /// What it is.
    pub what: String,
    /// Its value.
    pub value: String,
}

/// A subject and what it is.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Described {
    /// Its name.
    pub name: String,
    /// What it is.
    pub what: String,
}

/// What one experiment gave.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Its name.
    pub name: String,
    /// Where it is from.
    pub paper: String,
    /// What it asks.
    pub asks: String,
    /// What the paper found.
    pub finding: String,
    /// How to repeat it.
    pub command: String,
    /// Its parameters.
    pub parameters: Vec<Used>,
    /// How it is drawn.
    pub figures: Vec<Figure>,
    /// What it ran against.
    pub subjects: Vec<Described>,
    /// What was measured.
    pub points: Vec<Point>,
    /// What a store is to be made with on what was measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub profiles: Vec<StoreProfile>,
    /// What was found, in words.
    pub found: Vec<String>,
    /// Why it may differ from what the paper found.
    #[serde(default)]
    pub explains: String,
    /// What happened on the way.
    pub notes: Vec<String>,
    /// How long it took.
    pub seconds: f64,
}

/// A subject that this machine could not give.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Skipped {
    /// The subject.
    pub subject: String,
    /// For which experiment.
    pub experiment: String,
    /// What it would need.
    pub needs: String,
}

/// What a run gave.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Results {
    /// [`SCHEMA`].
    pub schema: u32,
    /// What measured.
    pub program: String,
    /// How it was called.
    pub command: String,
    /// When.
    pub started: String,
    /// How long it took.
    pub seconds: f64,
    /// `quick`, `paper`, or a factor.
    pub size: String,
    /// What replays its chances.
    pub seed: u64,
    /// Whether it was stopped.
    pub interrupted: bool,
    /// What it was measured on.
    pub machine: Machine,
    /// What one look at the clock cost.
    pub stopwatch_ns: f64,
    /// What was not measured.
    pub skipped: Vec<Skipped>,
    /// What to know before believing it.
    pub warnings: Vec<String>,
    /// What was measured.
    pub experiments: Vec<Outcome>,
}

impl Outcome {
    /// Adds one pass over a subject to the points.
    pub fn add(&mut self, subject: &str, samples: &[Sample]) {
        for sample in samples {
            let same = |point: &&mut Point| {
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
            self.points.push(Point {
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

    /// Works out medians and spreads.
    pub fn settle(&mut self) {
        for point in &mut self.points {
            point.median = stats::median(&point.values).unwrap_or(0.0);
            point.spread = stats::spread(&point.values);
        }
    }

    /// Its points, to look things up.
    pub fn look(&self) -> Points<'_> {
        Points(&self.points)
    }

    /// The figure of a metric.
    pub fn figure(&self, metric: &str) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.metric == metric)
    }

    /// Points whose repetitions lie far apart, as a part of all that were repeated.
    pub fn noisy(&self) -> Option<f64> {
        let repeated = || self.points.iter().filter(|point| point.values.len() > 1);
        let noisy = repeated().filter(|point| point.spread > NOISY).count();
        (noisy > 0).then(|| noisy as f64 / repeated().count() as f64)
    }
}

/// A median, and how far the repetitions reach.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Range {
    /// The median.
    pub median: f64,
    /// The least repetition.
    pub least: f64,
    /// The largest one.
    pub most: f64,
}

impl Range {
    /// How many times `other` this is; `None` where repetitions of the one reach into those of the
    /// other, so that they are not told apart.
    pub fn times(self, other: Self) -> Option<f64> {
        let is_apart = self.least > other.most || other.least > self.most;
        (is_apart && other.median > 0.0).then_some(self.median / other.median)
    }
}

impl Point {
    /// Its median and range.
    pub fn range(&self) -> Range {
        Range {
            median: self.median,
            least: self.values.iter().copied().fold(self.median, f64::min),
            most: self.values.iter().copied().fold(self.median, f64::max),
        }
    }
}

/// Points, to look things up.
#[derive(Clone, Copy)]
pub struct Points<'a>(pub &'a [Point]);

impl<'a> Points<'a> {
    /// All subjects, in the order in which they came.
    pub fn subjects(self) -> Vec<&'a str> {
        unique(self.0.iter().map(|point| point.subject.as_str()))
    }

    /// The series of a metric and subject.
    pub fn series(self, metric: &str, subject: &str) -> Vec<&'a str> {
        unique(self.of(metric, subject).map(|point| point.series.as_str()))
    }

    /// The points of a metric and subject.
    pub fn of(self, metric: &str, subject: &str) -> impl Iterator<Item = &'a Point> {
        let fits = move |point: &&'a Point| point.metric == metric && point.subject == subject;
        self.0.iter().filter(fits)
    }

    /// One line: places and medians.
    pub fn line(self, metric: &str, subject: &str, series: &str) -> Vec<(f64, f64)> {
        let fits = |point: &&Point| point.series == series;
        self.of(metric, subject).filter(fits).map(|point| (point.x, point.median)).collect()
    }

    /// One line: places and what was measured there.
    pub fn ranges(self, metric: &str, subject: &str, series: &str) -> Vec<(f64, Range)> {
        let fits = |point: &&Point| point.series == series;
        self.of(metric, subject).filter(fits).map(|point| (point.x, point.range())).collect()
    }

    /// The median at a place.
    pub fn at(self, metric: &str, subject: &str, series: &str, x: f64) -> Option<f64> {
        let line = self.line(metric, subject, series);
        line.iter().find(|(at, _)| *at == x).map(|(_, y)| *y)
    }

    /// The median under a name.
    pub fn named(self, metric: &str, subject: &str, series: &str, label: &str) -> Option<f64> {
        let fits = |p: &&Point| p.series == series && p.label.as_deref() == Some(label);
        self.of(metric, subject).find(fits).map(|point| point.median)
    }

    /// What was measured under a name.
    pub fn range(self, metric: &str, subject: &str, series: &str, label: &str) -> Option<Range> {
        let fits = |p: &&Point| p.series == series && p.label.as_deref() == Some(label);
        self.of(metric, subject).find(fits).map(Point::range)
    }

    /// The place with the largest value of a line.
    pub fn best(self, metric: &str, subject: &str, series: &str) -> Option<(f64, f64)> {
        let line = self.line(metric, subject, series);
        line.into_iter().max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// The mean of a line.
    pub fn mean(self, metric: &str, subject: &str, series: &str) -> Option<f64> {
        let line = self.line(metric, subject, series);
        stats::mean(&line.iter().map(|(_, y)| *y).collect::<Vec<_>>())
    }
}

/// Each once, in the order in which they came.
pub fn unique<'a>(all: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
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
    /// What the system says.
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

    /// Reads `results.json`, or the one in a directory.
    ///
    /// # Errors
    /// If there is none, or one of another time.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let path = if path.is_dir() { path.join("results.json") } else { path.into() };
        let text = std::fs::read(&path).with_context(|| path.display().to_string())?;
        let results: Self = serde_json::from_slice(&text)
            .with_context(|| format!("{} are no results of the lab", path.display()))?;
        if results.schema != SCHEMA {
            bail!("{}: schema {}, this program reads {SCHEMA}", path.display(), results.schema);
        }
        Ok(results)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_become_points() {
        let mut outcome = Outcome::default();
        for y in [1.0, 3.0, 2.0] {
            outcome.add("mem", &[Sample::at("speed", "warm", 4.0, y).cold(y < 3.0)]);
        }
        outcome.add("mem", &[Sample::named("speed", "warm", "x", 9.0)]);
        outcome.settle();
        assert_eq!(outcome.points.len(), 2);
        assert_eq!(outcome.look().at("speed", "mem", "warm", 4.0), Some(2.0));
        assert_eq!(outcome.points[0].cold, Some(false));
        assert_eq!(outcome.noisy(), Some(1.0));
        assert_eq!(outcome.look().named("speed", "mem", "warm", "x"), Some(9.0));
    }
}
