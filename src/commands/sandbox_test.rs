//! `draconis sandbox-test`: what a worker cannot do, tried.

use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use draconis_service::sandbox_test::{
    AttemptOutcome, AttemptReport, AttemptTargets, run_attempt, test_sandbox,
};
use draconis_types::path_bytes::ShowPath;

use crate::report;
use crate::text::format_bytes;

/// Test the sandbox of workers: processes confined like them attempt to get out.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Make one attempt in this process (started by sandbox-test itself).
    #[arg(long, hide = true, requires_all = ["dir", "port"])]
    attempt: Option<usize>,
    /// Memory limit of the process, in bytes.
    #[arg(long, hide = true)]
    memory: Option<u64>,
    /// Make the attempt without a sandbox.
    #[arg(long, hide = true)]
    unconfined: bool,
    /// Directory for the attempt.
    #[arg(long, hide = true)]
    dir: Option<PathBuf>,
    /// TCP port for the attempt.
    #[arg(long, hide = true)]
    port: Option<u16>,
}

/// Name of the command.
const SUBCOMMAND: &str = "sandbox-test";

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if let (Some(attempt), Some(dir), Some(port)) =
        (arguments.attempt, arguments.dir.clone(), arguments.port)
    {
        let targets = AttemptTargets { dir, port };
        let Err(why) = run_attempt(attempt, &targets, arguments.memory, !arguments.unconfined);
        bail!("{why}");
    }
    let dir = TemporaryDir::create()?;
    let tested = test_sandbox(SUBCOMMAND, &dir.0).map_err(anyhow::Error::msg)?;
    let confinement = &tested.confinement;
    report::print_line(format_args!(
        "confined as a worker: landlock {}, seccomp {}, {}, at most {} of private memory",
        confinement.landlock,
        if confinement.seccomp { "kills" } else { "off" },
        if confinement.no_capabilities { "no capabilities" } else { "some capabilities" },
        confinement.memory_limit_bytes.map_or("any amount".into(), format_bytes),
    ))?;
    report::print_line(format_args!("  {:<35} {:<28} in the sandbox", "attempt", "without"))?;
    for AttemptReport { name, unconfined, confined } in &tested.attempts {
        let (unconfined, confined) = (format_outcome(unconfined), format_outcome(confined));
        report::print_line(format_args!("  {name:<35} {unconfined:<28} {confined}"))?;
    }
    let breaches = tested.breaches();
    if !breaches.is_empty() {
        bail!("the sandbox did not refuse to {}", breaches.join(", to "));
    }
    report::print_line(format_args!("refused: all {} attempts", tested.attempts.len()))?;
    Ok(ExitCode::SUCCESS)
}

fn format_outcome(outcome: &AttemptOutcome) -> String {
    match outcome {
        AttemptOutcome::Succeeded => "succeeded".into(),
        AttemptOutcome::Killed => "killed by seccomp".into(),
        AttemptOutcome::Refused(why) => why.clone(),
    }
}

/// A directory in which every user may create files; deleted at the end.
struct TemporaryDir(PathBuf);

impl TemporaryDir {
    fn create() -> anyhow::Result<Self> {
        let path = std::path::absolute(std::env::temp_dir())?
            .join(format!("draconis-{SUBCOMMAND}-{}", std::process::id()));
        let create = || {
            std::fs::DirBuilder::new().mode(0o700).create(&path)?;
            // Not by its mode at creation, which the umask restricts.
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777))
        };
        create().with_context(|| path.shown().to_string())?;
        Ok(Self(path))
    }
}

impl Drop for TemporaryDir {
    fn drop(&mut self) {
        // At worst a file without contents stays.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
