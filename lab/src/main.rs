//! The lab: measures disks, file systems, memory and stores, and repeats every experiment of the
//! papers on the current machine.
//!
//! ```text
//!   main ── runner ──▶ experiments ──▶ subject: files, clock, caches, counters
//!              │                          directory · library · raw · model · memory
//!              ▼
//!           results.json, measurements.jsonl ──▶ terminal · report (HTML, plots) · compare
//!           profile-SUBJECT.json ──▶ draconis store create --profile
//!   crash: power cuts, with judges of its own
//! ```
//!
//! No other crate depends on this one.
#![forbid(unsafe_code)]

mod buffer;
mod child;
mod clock;
mod compare;
mod context;
mod crash;
mod experiments;
mod faults;
mod machine;
mod memory;
mod null_fs;
mod parameters;
mod pin;
mod plot;
mod pressure;
mod report;
mod results;
mod runner;
mod stats;
mod stop;
mod store_crash;
mod store_profile;
mod store_soak;
mod subject;
mod terminal;
mod units;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand};

use experiments::Experiment;
use parameters::{ParameterSettings, RunSize};
use results::Results;
use subject::RunEnvironment;

/// Benchmark disks, file systems, memory and stores; run crash tests.
#[derive(Debug, Parser)]
#[command(name = "draconis-lab", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List experiments, their parameters and published results.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Run experiments.
    #[command(after_long_help = SUBJECTS_HELP)]
    Run(RunArguments),
    /// Regenerate the report of a run.
    Report {
        /// Results directory.
        dir: PathBuf,
    },
    /// Compare two runs and mark significant changes.
    Compare {
        /// First run.
        a: PathBuf,
        /// Second run.
        b: PathBuf,
    },
    /// Test volumes for consistency after simulated power loss.
    Crash(crash::CrashArguments),
    /// Test mounts while faults are injected (needs FUSE, most kinds also root).
    Faults(faults::FaultsArguments),
    /// Mount an in-memory no-op file system (upper bound for FUSE servers).
    #[command(hide = true)]
    Memory {
        /// Use the kernel's write-back cache.
        #[arg(long)]
        write_back: bool,
        /// Mount point.
        at: PathBuf,
    },
    /// Test object stores for consistency after simulated power loss.
    StoreCrash(store_crash::StoreCrashArguments),
    /// Soak-test object stores with a full check after every step.
    StoreUse(store_soak::StoreUseArguments),
    /// The other side of `channel`.
    #[command(hide = true)]
    ChannelChild {
        /// Its CPU.
        cpu: usize,
    },
    /// The other side of `isolation`.
    #[command(hide = true)]
    IsolationChild {
        /// The volume.
        image: PathBuf,
    },
}

const SUBJECTS_HELP: &str = "\
Subjects:
  dir[:PATH]               a directory of a file system that is mounted
  kernel[:KIND]            a volume of its own, mounted by the kernel over a loop device;
                           KIND is ext2, ext3 or ext4
  fuse2fs[:KIND], draconis[:KIND]   the same volume by e2fsprogs' FUSE server, and by ours
  draconis-lib[:KIND]      our library in this process
  file[:PATH], dev:PATH    direct I/O without a file system (dev: with --destroy)
  model:hdd, model:ssd     modelled devices, in device time; model:ssd,page=8K,channels=2
  mem                      the machine's memory
  draconis-kv, leveldb, rocksdb, lmdb, redb, fjall   key-value stores
  delay:read=1ms,sync=5ms  memory with known delays, to judge the lab itself";

/// What is run, and how.
#[derive(Debug, Args)]
struct RunArguments {
    /// Experiments, or `all`.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Subject to test (repeatable; default: listed by each experiment).
    #[arg(long, value_name = "S")]
    subject: Vec<String>,
    /// quick, paper, or a multiple of quick.
    #[arg(long, default_value = "quick")]
    size: RunSize,
    /// Output directory.
    #[arg(long, default_value = "lab-results")]
    out: PathBuf,
    /// Random seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Change a parameter: `key=value`, or `experiment.key=value`.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Print the results as JSON.
    #[arg(long)]
    json: bool,
    /// Allow overwriting devices and files.
    #[arg(long)]
    destroy: bool,
    /// Directory for temporary images.
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// Path of draconis (default: next to draconis-lab).
    #[arg(long)]
    draconis: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("draconis-lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Writes to standard output; ignores a closed pipe.
fn print_text(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::List { json } => list_experiments(json)?,
        Command::Run(arguments) => return run_experiments(&arguments),
        Command::Report { dir } => {
            let results = Results::read(&dir)?;
            print_text(&format!("{}\n", report::write(&results, &dir)?.display()))?;
        }
        Command::Compare { a, b } => {
            print_text(&compare::format_comparison(&Results::read(&a)?, &Results::read(&b)?))?;
        }
        Command::Memory { write_back, at } => null_fs::serve_null_fs(&at, write_back)?,
        Command::ChannelChild { cpu } => experiments::serve_channel(cpu)?,
        Command::IsolationChild { image } => experiments::serve_isolation(&image)?,
        Command::Crash(arguments) => crash::run(&arguments)?,
        Command::Faults(arguments) => faults::run(&arguments)?,
        Command::StoreCrash(arguments) => store_crash::run(&arguments)?,
        Command::StoreUse(arguments) => store_soak::run(&arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn list_experiments(json: bool) -> anyhow::Result<()> {
    if json {
        let all: Vec<_> =
            experiments::ALL_EXPERIMENTS.iter().map(|one| experiment_json(*one)).collect();
        return print_text(&(serde_json::to_string_pretty(&all)? + "\n"));
    }
    let (mut text, mut paper) = (String::new(), "");
    for about in experiments::ALL_EXPERIMENTS.iter().map(|one| one.info()) {
        if about.paper.title() != paper {
            paper = about.paper.title();
            writeln!(text, "\n{paper}")?;
        }
        writeln!(text, "\n  {}", about.name)?;
        writeln!(text, "    asks: {}", about.question)?;
        writeln!(text, "    the paper: {}", about.published_result)?;
        writeln!(text, "    subjects: {}", about.subjects.join(", "))?;
        let takes = |is_paper| {
            let seconds = experiments::estimated_seconds(about.name, is_paper);
            seconds.map_or("unknown".into(), units::format_duration)
        };
        writeln!(text, "    takes: about {}; of the paper's size {}", takes(false), takes(true))?;
        for p in about.parameters {
            let (name, what) = (p.name, p.what);
            writeln!(text, "    --set {name}=   {what} (quick {}, paper {})", p.quick, p.paper)?;
        }
    }
    print_text(&text)
}

fn experiment_json(experiment: &dyn Experiment) -> serde_json::Value {
    let parameter = |p: &parameters::Parameter| {
        serde_json::json!({
            "name": p.name, "what": p.what, "quick": p.quick, "paper": p.paper,
        })
    };
    let about = experiment.info();
    let parameters: Vec<_> = about.parameters.iter().map(parameter).collect();
    serde_json::json!({
        "name": about.name,
        "paper": about.paper.title(),
        "asks": about.question,
        "finding": about.published_result,
        "subjects": about.subjects,
        "parameters": parameters,
        "figures": experiment.figures(),
        "seconds_quick": experiments::estimated_seconds(about.name, false),
        "seconds_paper": experiments::estimated_seconds(about.name, true),
    })
}

fn select_experiments(names: &[String]) -> anyhow::Result<Vec<&'static dyn Experiment>> {
    if names.iter().any(|name| name == "all") {
        return Ok(experiments::ALL_EXPERIMENTS.to_vec());
    }
    let find = |name: &String| {
        experiments::find_by_name(name)
            .with_context(|| format!("no experiment {name}; `list` shows them all"))
    };
    names.iter().map(find).collect()
}

/// Prints the expected duration of the run.
fn print_expected_duration(experiments: &[&'static dyn Experiment], size: RunSize) {
    let is_paper = size == RunSize::Paper;
    let seconds = experiments
        .iter()
        .filter_map(|one| experiments::estimated_seconds(one.info().name, is_paper));
    let about = units::format_duration(seconds.sum());
    let count = experiments.len();
    match size {
        RunSize::Times(times) => eprintln!(
            "{count} experiments, {times} times the quick size: quick takes about {about}"
        ),
        _ => eprintln!("{count} experiments, about {about} on 2 CPUs if all subjects are here"),
    }
}

fn run_experiments(arguments: &RunArguments) -> anyhow::Result<ExitCode> {
    let experiments = select_experiments(&arguments.names)?;
    let settings = ParameterSettings::parse(&arguments.set)?;
    let known: Vec<(&str, &str)> = experiments
        .iter()
        .map(|one| one.info())
        .flat_map(|one| one.parameters.iter().map(|p| (one.name, p.name)))
        .collect();
    settings.check(&known)?;
    if let Some(spec) = arguments.subject.iter().find(|spec| subject::subject_kind(spec).is_none())
    {
        bail!("nobody knows the subject {spec}\n{SUBJECTS_HELP}");
    }
    for dir in [&arguments.out, &arguments.dir] {
        std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    }
    let beside = |name: &str| -> anyhow::Result<PathBuf> {
        let own = std::env::current_exe()?;
        Ok(own.parent().unwrap_or(Path::new("")).join(name))
    };
    let workshop = RunEnvironment {
        dir: arguments.dir.clone(),
        draconis: arguments.draconis.clone().map_or_else(|| beside("draconis"), Ok)?,
        peers: beside("draconis-lab-peers")?,
        destroy: arguments.destroy,
        bytes: 0,
    };
    print_expected_duration(&experiments, arguments.size);
    let plan = runner::RunPlan {
        experiments,
        subjects: arguments.subject.clone(),
        size: arguments.size,
        seed: arguments.seed,
        settings,
        workshop,
        stop: stop::StopFlag::install_signal_handlers()?,
        progress: !arguments.json,
    };
    let results = runner::run_plan(&plan, &|results| results.write(&arguments.out))?;
    results.write(&arguments.out)?;
    let report = report::write(&results, &arguments.out)?;
    if arguments.json {
        print_text(&(serde_json::to_string_pretty(&results)? + "\n"))?;
    } else {
        let mut text = format!("{}\n", results.machine);
        let told = |one| terminal::format_outcome(one, &arguments.out);
        text.extend(results.experiments.iter().map(told));
        write!(text, "\n{}report: {}\n", terminal::format_footer(&results), report.display())?;
        print_text(&text)?;
    }
    // Status of a program that SIGINT killed.
    Ok(if results.interrupted { ExitCode::from(130) } else { ExitCode::SUCCESS })
}
