//! External programs as clients: run again and again in a directory of the mount. Each run must
//! succeed, except those that are killed: that interrupts a call.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use draconis_device::Random;
use rustix::process::{Pid, Signal};

use super::SharedState;

/// Maximum time until a run is killed.
const MAX_RUN_MS: u64 = 3000;
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Runs the shell `command` in `dir` until the test ends.
///
/// # Errors
/// A run failed that was not killed.
pub(super) fn run(
    command: &str,
    dir: &Path,
    seed: u64,
    shared: &SharedState,
) -> anyhow::Result<()> {
    let mut random = Random::new(seed);
    std::fs::create_dir_all(dir)?;
    let mut runs = 0_u64;
    while !shared.is_over() {
        runs += 1;
        let done = run_once(command, dir, &mut random, shared);
        if done.is_err() {
            shared.end();
        }
        done.with_context(|| format!("{command}: run {runs}"))?;
    }
    Ok(())
}

fn run_once(
    command: &str,
    dir: &Path,
    random: &mut Random,
    shared: &SharedState,
) -> anyhow::Result<()> {
    let output = tempfile::tempfile()?;
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(command).current_dir(dir).process_group(0).stdin(Stdio::null());
    shell.stdout(output.try_clone()?).stderr(output.try_clone()?);
    let mut child = shell.spawn().context("sh")?;
    let is_killed = random.once_in(2);
    let until = Instant::now() + Duration::from_millis(random.next_below(MAX_RUN_MS));
    loop {
        if let Some(status) = child.try_wait()? {
            if status.success() {
                return Ok(());
            }
            bail!("{status}: {}", output_tail(output)?);
        }
        if shared.is_over() || is_killed && Instant::now() > until {
            return kill(&mut child);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Kills a shell and its children.
fn kill(child: &mut Child) -> anyhow::Result<()> {
    let group = Pid::from_child(child);
    rustix::process::kill_process_group(group, Signal::KILL)?;
    child.wait()?;
    Ok(())
}

fn output_tail(mut output: std::fs::File) -> anyhow::Result<String> {
    use std::io::{Read, Seek, SeekFrom};
    const MAX_TAIL_BYTES: u64 = 2000;
    let len = output.seek(SeekFrom::End(0))?;
    output.seek(SeekFrom::Start(len.saturating_sub(MAX_TAIL_BYTES)))?;
    let mut said = vec![];
    output.take(MAX_TAIL_BYTES).read_to_end(&mut said)?;
    Ok(String::from_utf8_lossy(&said).trim().to_owned())
}
