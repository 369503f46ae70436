//! Servers of a mounted volume: the kernel, fuse2fs, Draconis.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// Server of a mount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MountServer {
    /// The kernel's driver over a loop device.
    Kernel,
    /// The FUSE server of e2fsprogs.
    Fuse2fs,
    /// Draconis.
    Draconis,
    /// A tree in memory behind our front end, without a volume: the upper bound for a FUSE
    /// server.
    Memory,
}

impl MountServer {
    /// Returns the name for tables.
    pub fn name(self) -> &'static str {
        match self {
            MountServer::Kernel => "kernel",
            MountServer::Fuse2fs => "fuse2fs",
            MountServer::Draconis => "draconis",
            MountServer::Memory => "no-op",
        }
    }
}

/// A mounted volume, unmounted on drop.
pub struct MountedVolume {
    at: PathBuf,
    server: MountServer,
    draconis: PathBuf,
    /// Process that serves the tree in memory.
    memory: Option<Child>,
}

impl MountedVolume {
    /// Mounts `image` on `at` read-write.
    pub fn mount_read_write(
        server: MountServer,
        image: &Path,
        at: &Path,
        draconis: &Path,
    ) -> anyhow::Result<Self> {
        if server == MountServer::Memory {
            return Self::in_memory(at, draconis);
        }
        Self::mount(server, "rw", image, at, draconis)
    }

    fn mount(
        server: MountServer,
        how: &str,
        image: &Path,
        at: &Path,
        draconis: &Path,
    ) -> anyhow::Result<Self> {
        let mut command = match server {
            MountServer::Kernel => Command::new("mount"),
            MountServer::Fuse2fs => Command::new("fuse2fs"),
            MountServer::Draconis => Command::new(draconis),
            MountServer::Memory => bail!("a tree in memory holds no volume"),
        };
        if server == MountServer::Draconis {
            command.arg("mount");
        }
        let loops = if server == MountServer::Kernel { "loop," } else { "" };
        command.args(["-o", &format!("{loops}{how}")]);
        let output = command.arg(image).arg(at).output().context(server.name())?;
        if !output.status.success() {
            bail!("{}: {}", server.name(), String::from_utf8_lossy(&output.stderr));
        }
        Ok(Self { at: at.into(), server, draconis: draconis.into(), memory: None })
    }

    fn in_memory(at: &Path, draconis: &Path) -> anyhow::Result<Self> {
        let child = Command::new("/proc/self/exe").arg("memory").arg(at).spawn()?;
        let server = MountServer::Memory;
        let mounted =
            Self { at: at.into(), server, draconis: draconis.into(), memory: Some(child) };
        let outside = std::fs::metadata(at.join(".."))?.dev();
        let until = Instant::now() + Duration::from_secs(10);
        while std::fs::metadata(at)?.dev() == outside {
            if Instant::now() > until {
                bail!("the tree in memory was not mounted");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(mounted)
    }

    /// Returns the mount point.
    pub fn mount_point(&self) -> &Path {
        &self.at
    }
}

impl Drop for MountedVolume {
    fn drop(&mut self) {
        let mut command = match self.server {
            MountServer::Draconis => Command::new(&self.draconis),
            _ => Command::new("umount"),
        };
        if self.server == MountServer::Draconis {
            command.arg("umount");
        }
        let ended = command.arg(&self.at).stderr(Stdio::null()).status();
        if !ended.is_ok_and(|status| status.success()) {
            eprintln!("{} is still mounted", self.at.display());
        }
        if let Some(child) = &mut self.memory {
            let _ = child.wait();
        }
        // fuse2fs releases the image shortly after the unmount.
        if self.server == MountServer::Fuse2fs {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Empties the kernel's caches, so that a cold run reads from the device.
pub fn drop_caches() -> anyhow::Result<()> {
    rustix::fs::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "3").context("cold caches need root")
}

/// Runs a command, reads and discards its output, and returns the duration.
pub fn time_command(command: &mut Command) -> anyhow::Result<Duration> {
    let started = Instant::now();
    let mut child = command.stdout(Stdio::piped()).stdin(Stdio::null()).spawn()?;
    if let Some(mut output) = child.stdout.take() {
        let mut buffer = vec![0; 1 << 20];
        while std::io::Read::read(&mut output, &mut buffer)? > 0 {}
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(started.elapsed())
}
