//! A mount of a new volume, with its own manager.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use draconis_service::client::manager_socket_name;
use draconis_service::protocol::{self, MountStatus, Reply, Request, Status};
use draconis_types::injected_fault::{DELAY_VARIABLE, FAULTS_VARIABLE};
use rustix::process::{Pid, Signal};

use super::Round;

/// A mount of a new volume, with its own manager.
pub(super) struct TestMount {
    draconis: PathBuf,
    variables: Vec<(&'static str, String)>,
    image: PathBuf,
    options: Option<String>,
    dir: tempfile::TempDir,
}

impl TestMount {
    /// Makes directories for a mount. The image is there, or will be.
    pub(super) fn new(round: &Round<'_>, more_options: &str) -> anyhow::Result<Self> {
        let arguments = round.arguments;
        let beside = || -> anyhow::Result<PathBuf> {
            let own = std::env::current_exe()?;
            Ok(own.parent().unwrap_or(Path::new("")).join("draconis"))
        };
        let draconis = arguments.draconis.clone().map_or_else(beside, Ok)?;
        let dir = tempfile::Builder::new().prefix("faults-").tempdir_in(&arguments.dir)?;
        let omission = round.omission.map(|fault| (FAULTS_VARIABLE, format!("{fault:?}")));
        let delay = arguments.linger.map(|point| (DELAY_VARIABLE, format!("{point:?}")));
        let variables = omission.into_iter().chain(delay).collect();
        let options = [arguments.options.as_deref().unwrap_or_default(), more_options];
        let options: Vec<&str> = options.into_iter().filter(|list| !list.is_empty()).collect();
        let options = (!options.is_empty()).then(|| options.join(","));
        let image = dir.path().join("image");
        let mount = Self { draconis, variables, image, options, dir };
        for name in ["run", "mnt", "below"] {
            std::fs::create_dir(mount.path(name))?;
        }
        Ok(mount)
    }

    /// Places the image in the file system that is mounted at `below`.
    pub(super) fn place_image_below(&mut self) {
        self.image = self.path("below").join("image");
    }

    pub(super) fn image(&self) -> &Path {
        &self.image
    }

    /// Makes a volume of `mebibytes`, with the files of `tree`.
    pub(super) fn make_volume(
        &self,
        round: &Round<'_>,
        mebibytes: u64,
        tree: Option<&Path>,
    ) -> anyhow::Result<()> {
        make_volume(round, self.image(), mebibytes, tree)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(super) fn draconis(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.draconis);
        command.env("DRACONIS_RUNTIME_DIR", self.path("run")).args(arguments);
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    pub(super) fn mount(&self) -> anyhow::Result<()> {
        let mut command = self.draconis(&["mount"]);
        command.args(self.options.iter().map(|options| format!("-o{options}")));
        run_command(command.arg(self.image()).arg(self.path("mnt")))
    }

    pub(super) fn unmount(&self) -> anyhow::Result<()> {
        run_command(self.draconis(&["umount"]).arg(self.path("mnt")))
    }

    /// Returns the last lines of the log of the manager and its workers.
    pub(super) fn log_tail(&self) -> String {
        let log = std::fs::read_to_string(self.path("run/manager.log")).unwrap_or_default();
        let lines: Vec<&str> =
            log.lines().filter(|line| !line.contains("has taken over")).collect();
        lines[lines.len().saturating_sub(20)..].iter().map(|line| format!("  {line}\n")).collect()
    }

    pub(super) fn run_e2fsck(&self) -> anyhow::Result<()> {
        run_command(Command::new("e2fsck").arg("-fn").arg(self.image()))
    }

    pub(super) fn status(&self) -> anyhow::Result<MountStatus> {
        self.query_status()?.mounts.into_iter().next().context("no mount")
    }

    pub(super) fn query_status(&self) -> anyhow::Result<Status> {
        let socket = self.path("run").join(manager_socket_name());
        let socket = std::os::unix::net::UnixStream::connect(socket)?;
        protocol::send_line(&socket, &Request::Status)?;
        match protocol::receive_line(&socket)? {
            Reply::Status(status) => Ok(status),
            other => bail!("{other:?}"),
        }
    }
}

impl Drop for TestMount {
    fn drop(&mut self) {
        // After a failed run, because the directory is deleted.
        let mut command = self.draconis(&["umount", "--force"]);
        let _ = command.arg(self.path("mnt")).output();
    }
}

/// Makes a volume of `mebibytes` in the file `image`, with the files of `tree`.
pub(super) fn make_volume(
    round: &Round<'_>,
    image: &Path,
    mebibytes: u64,
    tree: Option<&Path>,
) -> anyhow::Result<()> {
    std::fs::File::create(image)?.set_len(mebibytes << 20)?;
    let mut make = Command::new("mke2fs");
    make.args(["-q", "-F", "-t", round.volume]).args(&round.arguments.mke2fs);
    make.args(tree.iter().flat_map(|tree| ["-d".as_ref(), tree.as_os_str()]));
    run_command(make.arg(image))
}

pub(super) fn run_command(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| name.clone())?;
    if !output.status.success() {
        let errors = [output.stdout, output.stderr].concat();
        bail!("{name}: {}: {}", output.status, String::from_utf8_lossy(&errors).trim());
    }
    Ok(())
}

pub(super) fn process_id(pid: u32) -> anyhow::Result<Pid> {
    Pid::from_raw(pid as i32).context("a process without a number")
}

pub(super) fn send_signal(pid: u32, signal: Signal) -> anyhow::Result<()> {
    Ok(rustix::process::kill_process(process_id(pid)?, signal)?)
}
