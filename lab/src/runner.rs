//! Runs experiments: alternates between the subjects, so that other load affects all of them.
//!
//! ```text
//!   for each experiment
//!     open every subject ── what this machine cannot give is skipped, aloud
//!     pass 0: warm-up, thrown away (a model needs none, and one pass is all)
//!     pass 1..n: A B C, A B C, ...
//!     close every subject: unmounted, judged, removed
//! ```

use std::io::IsTerminal;
use std::time::Instant;

use anyhow::bail;
use indicatif::{ProgressBar, ProgressStyle};

use crate::clock;
use crate::context::RunContext;
use crate::experiments::{Experiment, ExperimentInfo};
use crate::machine::{self, MachineDescription};
use crate::parameters::{self, ParameterSettings, RunSize};
use crate::results::{
    ExperimentResult, Results, SCHEMA_VERSION, SkippedSubject, SubjectDescription, UsedParameter,
};
use crate::stop::{RunStopped, StopFlag};
use crate::subject::{self, RunEnvironment, Subject, SubjectKind};

/// Selection and options of a run.
pub struct RunPlan {
    /// Experiments.
    pub experiments: Vec<&'static dyn Experiment>,
    /// Subjects; if empty, the defaults of each experiment.
    pub subjects: Vec<String>,
    /// Size of the run.
    pub size: RunSize,
    /// Random seed.
    pub seed: u64,
    /// Parameter values.
    pub settings: ParameterSettings,
    /// Environment for creating files and subjects.
    pub workshop: RunEnvironment,
    /// Stop flag.
    pub stop: StopFlag,
    /// True to show progress.
    pub progress: bool,
}

/// Disk space that is left free, in bytes.
const MIN_FREE_BYTES: u64 = 512 << 20;
/// Memory that is left free, in bytes.
const MIN_FREE_MEMORY_BYTES: u64 = 256 << 20;

/// Runs the plan. If it is stopped, returns the results so far. Calls `keep` with the results after
/// each experiment, because a run may take hours.
///
/// # Errors
/// `keep` fails.
pub fn run_plan(
    plan: &RunPlan,
    keep: &dyn Fn(&Results) -> anyhow::Result<()>,
) -> anyhow::Result<Results> {
    let started = Instant::now();
    let machine = MachineDescription::detect(&plan.workshop.dir);
    let mut results = Results {
        schema: SCHEMA_VERSION,
        program: format!("draconis-lab {}", env!("CARGO_PKG_VERSION")),
        command: command_line(),
        started: machine.date.clone(),
        seconds: 0.0,
        size: plan.size.to_string(),
        seed: plan.seed,
        interrupted: false,
        machine,
        stopwatch_ns: clock::measure_lap_cost_ns(),
        skipped: vec![],
        warnings: vec![],
        experiments: vec![],
    };
    for experiment in &plan.experiments {
        let outcome = ExperimentRun::new(plan, *experiment, &mut results).run();
        if plan.progress && !std::io::stderr().is_terminal() {
            eprintln!("{}: {:.0} s", outcome.name, outcome.seconds);
        }
        results.experiments.push(outcome);
        results.seconds = started.elapsed().as_secs_f64();
        results.interrupted = true;
        keep(&results)?;
        if plan.stop.check_not_stopped().is_err() {
            break;
        }
        results.interrupted = false;
    }
    results.seconds = started.elapsed().as_secs_f64();
    add_reliability_warnings(&mut results);
    Ok(results)
}

fn command_line() -> String {
    let mut all = std::env::args();
    let name = all.next().unwrap_or_default();
    let name = name.rsplit('/').next().unwrap_or_default().to_string();
    std::iter::once(name).chain(all).collect::<Vec<_>>().join(" ")
}

/// Adds warnings about the reliability of the results.
fn add_reliability_warnings(results: &mut Results) {
    let machine = &results.machine;
    let mut warnings = vec![];
    if machine.load.parse::<f64>().is_ok_and(|load| load > 0.5) {
        warnings.push(format!("the machine was busy before the run: load {}", machine.load));
    }
    if machine.virtual_machine {
        warnings.push(
            "a virtual machine: its disk is somebody else's file or network, with caches of its \
             own"
            .into(),
        );
    }
    if results.stopwatch_ns > 50.0 {
        warnings.push(format!("a look at the clock costs {:.0} ns here", results.stopwatch_ns));
    }
    let noisy: Vec<String> = results
        .experiments
        .iter()
        .filter_map(|outcome| Some((outcome, outcome.noisy_share().filter(|part| *part > 0.25)?)))
        .map(|(outcome, part)| format!("{} ({:.0} %)", outcome.name, part * 100.0))
        .collect();
    if !noisy.is_empty() {
        warnings.push(format!(
            "a noisy neighbour, or too small a run: a spread above 20 % (of so many of the values) \
             in {}",
            noisy.join(", ")
        ));
    }
    for outcome in &results.experiments {
        let cold = |cold| outcome.points.iter().filter(|point| point.cold == Some(cold)).count();
        if cold(false) > 0 {
            warnings.push(format!(
                "{}: {} of {} cold points were not: their reads did not all reach the device",
                outcome.name,
                cold(false),
                cold(false) + cold(true),
            ));
        }
    }
    results.warnings.append(&mut warnings);
}

struct ExperimentRun<'a> {
    plan: &'a RunPlan,
    experiment: &'static dyn Experiment,
    about: &'static ExperimentInfo,
    results: &'a mut Results,
}

impl<'a> ExperimentRun<'a> {
    fn new(
        plan: &'a RunPlan,
        experiment: &'static dyn Experiment,
        results: &'a mut Results,
    ) -> Self {
        Self { plan, experiment, about: experiment.info(), results }
    }

    fn run(&mut self) -> ExperimentResult {
        let started = Instant::now();
        let mut outcome = self.describe_experiment();
        if let Err(error) = self.measure(&mut outcome)
            && !error.is::<RunStopped>()
        {
            outcome.notes.push(format!("ended early: {error:#}"));
            self.results.warnings.push(format!("{}: {error:#}", self.about.name));
        }
        outcome.compute_medians_and_spreads();
        outcome.found = self.experiment.summarize(outcome.points());
        outcome.seconds = started.elapsed().as_secs_f64();
        outcome
    }

    fn describe_experiment(&self) -> ExperimentResult {
        let (about, plan) = (self.about, self.plan);
        let used = |p: &parameters::Parameter| UsedParameter {
            name: p.name.into(),
            what: p.what.into(),
            value: parameters::parameter_value(about.name, p, plan.size, &plan.settings),
        };
        let command = format!(
            "draconis lab run {}{} --size {} --seed {}",
            about.name,
            plan.subjects.iter().map(|s| format!(" --subject {s}")).collect::<String>(),
            plan.size,
            plan.seed,
        );
        ExperimentResult {
            name: about.name.into(),
            paper: about.paper.title().into(),
            asks: about.question.into(),
            finding: about.published_result.into(),
            explains: about.caveat.into(),
            command,
            parameters: about.parameters.iter().map(used).collect(),
            figures: self.experiment.figures(),
            ..ExperimentResult::default()
        }
    }

    fn make_context(&self) -> RunContext {
        let plan = self.plan;
        let value = |p| parameters::parameter_value(self.about.name, p, plan.size, &plan.settings);
        let values = self.about.parameters.iter().map(|p| (p.name, value(p))).collect();
        RunContext::new(values, plan.seed, plan.workshop.clone(), plan.stop.clone())
    }

    fn measure(&mut self, outcome: &mut ExperimentResult) -> anyhow::Result<()> {
        let mut context = self.make_context();
        context.workshop.bytes = self.experiment.required_bytes(&context)?;
        let mut subjects = self.open(&context, outcome)?;
        let passes = self.pass_count();
        let bar = self.progress_bar(passes * subjects.len() as u64);
        let warm_up = u64::from(self.about.warms_up);
        for pass in 0..passes + warm_up {
            context.repetition = pass.saturating_sub(warm_up);
            for (subject, alive) in &mut subjects {
                // A model is deterministic: one pass suffices.
                let once = subject.kind() == SubjectKind::Model;
                if !*alive || (once && pass != warm_up) {
                    continue;
                }
                context.check_not_stopped()?;
                bar.set_message(format!("{} {}", self.about.name, subject.name()));
                match self.experiment.run(&context, &mut **subject) {
                    Ok(_) if pass < warm_up => {}
                    Ok(samples) => outcome.add_samples(&subject.name(), &samples),
                    Err(error) if error.is::<RunStopped>() => return Err(error),
                    Err(error) => {
                        *alive = false;
                        self.report_error(outcome, &subject.name(), &format!("{error:#}"));
                    }
                }
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        outcome.notes.append(&mut context.take_notes());
        outcome.profiles = context.take_profiles();
        for (subject, _) in &mut subjects {
            if let Err(error) = subject.close() {
                self.report_error(outcome, &subject.name(), &format!("{error:#}"));
            }
        }
        Ok(())
    }

    fn pass_count(&self) -> u64 {
        let (quick, paper) = self.about.repetitions;
        if self.plan.size == RunSize::Paper { paper } else { quick }
    }

    fn progress_bar(&self, steps: u64) -> ProgressBar {
        if !self.plan.progress {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new(steps);
        if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg}") {
            bar.set_style(style);
        }
        bar
    }

    fn report_error(&mut self, outcome: &mut ExperimentResult, subject: &str, what: &str) {
        eprintln!("{}: {subject}: {what}", outcome.name);
        outcome.notes.push(format!("{subject}: {what}"));
        self.results.warnings.push(format!("{}: {subject}: {what}", outcome.name));
    }

    fn skip_subject(&mut self, subject: &str, needs: String) {
        let experiment = self.about.name.to_string();
        eprintln!("{experiment}: skipped {subject}: it needs {needs}");
        self.results.skipped.push(SkippedSubject { subject: subject.into(), experiment, needs });
    }

    /// Opens all available subjects; the flag says if a subject still works.
    fn open(
        &mut self,
        context: &RunContext,
        outcome: &mut ExperimentResult,
    ) -> anyhow::Result<Vec<(Box<dyn Subject>, bool)>> {
        let asked = !self.plan.subjects.is_empty();
        let wanted: Vec<String> = if asked {
            self.plan.subjects.clone()
        } else {
            self.about.subjects.iter().map(|spec| (*spec).to_string()).collect()
        };
        let room = free_space_bytes(&context.workshop.dir);
        let memory = self.experiment.required_memory_bytes(context)? + MIN_FREE_MEMORY_BYTES;
        let enough = machine::meminfo_bytes("MemAvailable:").is_none_or(|there| memory <= there);
        let mut subjects: Vec<(Box<dyn Subject>, bool)> = vec![];
        for spec in wanted {
            context.check_not_stopped()?;
            let Some(kind) = subject::subject_kind(&spec) else {
                bail!("nobody knows the subject {spec}");
            };
            if !(self.about.accepts)(kind) {
                self.skip_subject(
                    &spec,
                    format!("another experiment: {spec} has not what this asks"),
                );
                continue;
            }
            // Key-value stores are removed one by one, so they need space only once.
            let beside = if kind == SubjectKind::KeyValue { 0 } else { subjects.len() as u64 };
            let taken = context.workshop.bytes * (beside + 1);
            if kind != SubjectKind::Model && taken + MIN_FREE_BYTES > room {
                self.skip_subject(&spec, format!("{} MiB of room", (taken + MIN_FREE_BYTES) >> 20));
                continue;
            }
            if !enough {
                self.skip_subject(&spec, format!("{} MiB of memory", memory >> 20));
                continue;
            }
            match subject::open(&spec, &context.workshop) {
                Ok(subject) => {
                    let (name, what) = (subject.name(), subject.describe());
                    outcome.subjects.push(SubjectDescription { name, what });
                    subjects.push((subject, true));
                }
                Err(needs) => self.skip_subject(&spec, needs.to_string()),
            }
        }
        Ok(subjects)
    }
}

/// Returns the free space of the lab's directory, in bytes.
fn free_space_bytes(dir: &std::path::Path) -> u64 {
    rustix::fs::statvfs(dir).map_or(u64::MAX, |found| found.f_bavail * found.f_frsize)
}
