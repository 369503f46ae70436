//! Child processes of a measurement, which end with the run.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};

use crate::context::RunContext;

/// Poll interval for detecting that the run was stopped.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Returns the standard output of a program that succeeds.
///
/// # Errors
/// The program's error output; [`crate::stop::RunStopped`] after the program was killed.
pub fn run_and_capture(context: &RunContext, command: &mut Command) -> anyhow::Result<Vec<u8>> {
    let name = command.get_program().to_string_lossy().into_owned();
    let name = name.rsplit('/').next().unwrap_or_default().to_string();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("the program {name}"))?;
    let (mut out, mut err) = (child.stdout.take(), child.stderr.take());
    std::thread::scope(|scope| {
        let said = scope.spawn(move || read_to_end(&mut err));
        let written = scope.spawn(move || read_to_end(&mut out));
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if let Err(stopped) = context.check_not_stopped() {
                let _ = child.kill();
                let _ = child.wait();
                return Err(stopped.into());
            }
            std::thread::sleep(STOP_POLL_INTERVAL);
        };
        let (said, written) = (said.join(), written.join());
        if !status.success() {
            let said = said.unwrap_or_default();
            bail!("{name}: {status}: {}", String::from_utf8_lossy(&said).trim());
        }
        written.ok().context("what it wrote")
    })
}

fn read_to_end(from: &mut Option<impl Read>) -> Vec<u8> {
    let mut all = vec![];
    if let Some(from) = from {
        let _ = from.read_to_end(&mut all);
    }
    all
}
