//! `draconis serve`: the manager in the foreground.

use std::os::unix::net::UnixListener;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use draconis_service::client::RuntimeDir;
use draconis_service::manager::Manager;
use draconis_service::sandbox::close_other_fds;
use listenfd::ListenFd;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Run the mount manager in the foreground.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Exit 5 seconds after the last unmount.
    #[arg(long)]
    until_idle: bool,
}

/// Time after the last unmount until a manager started for a mount exits.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.until_idle {
        // Closes inherited descriptors: a file open on a mount, for example, would keep that mount
        // busy.
        close_other_fds(&[]);
    }
    let directory = RuntimeDir::open()?;
    let Some(listener) = manager_socket(&directory)? else {
        // Two concurrent mounts may each start a manager; one of them exits.
        if arguments.until_idle {
            return Ok(ExitCode::SUCCESS);
        }
        bail!("a manager runs already; see draconis status");
    };
    let manager = Manager::new(directory.clone())?;
    manager.listen(listener);
    // A no-op unless systemd started the manager.
    sd_notify::notify(&[sd_notify::NotifyState::Ready])?;
    let (ending, bound) = (manager.clone(), directory.clone());
    on_signal(move || {
        ending.unmount_all();
        bound.unbind();
        std::process::exit(0);
    })?;
    if arguments.until_idle {
        manager.wait_idle(IDLE_TIMEOUT);
    } else {
        manager.wait_until_retired();
    }
    directory.unbind();
    Ok(ExitCode::SUCCESS)
}

/// Returns the socket passed by systemd, else a new one; `None` if another manager runs.
fn manager_socket(directory: &RuntimeDir) -> std::io::Result<Option<UnixListener>> {
    let passed = ListenFd::from_env().take_unix_listener(0)?;
    passed.map_or_else(|| directory.bind(), |passed| Ok(Some(passed)))
}

/// Calls `then` on the first SIGINT, SIGTERM or SIGHUP; the second one ends the process
/// at once.
pub fn on_signal(then: impl FnOnce() + Send + 'static) -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    std::thread::spawn(move || {
        let mut signals = signals.forever();
        if signals.next().is_none() {
            return;
        }
        std::thread::spawn(then);
        if let Some(second) = signals.next() {
            std::process::exit(128 + second);
        }
    });
    Ok(())
}
