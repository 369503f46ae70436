//! Locations for stores: a directory, or a bucket of versitygw if it is installed.

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use super::{Draconis, has_tool, report_skipped, wait_until};
use draconis_testkit::find_versitygw;

/// Location of a store, and the environment of commands that access it.
pub struct TestBucket {
    pub draconis: Draconis,
    pub address: String,
    environment: Vec<(&'static str, String)>,
    server: Option<S3Server>,
}

/// A server, killed on drop.
struct S3Server {
    child: Child,
    root: PathBuf,
    port: u16,
}

impl S3Server {
    /// Starts versitygw on a directory.
    fn start(root: PathBuf, port: u16) -> Option<Self> {
        let mut command = Command::new(find_versitygw()?);
        command.args(["--access", "access", "--secret", "secret-of-a-test", "--quiet", "--port"]);
        command.arg(format!("127.0.0.1:{port}")).arg("posix").arg(&root);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let server = Self { child, root, port };
        wait_until("versitygw answers", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        Some(server)
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl TestBucket {
    pub fn directory_bucket() -> Self {
        let draconis = Draconis::new();
        let address = format!("file://{}", draconis.path("bucket").display());
        Self { draconis, address, environment: vec![], server: None }
    }

    /// Returns a bucket of versitygw; `None` if it is not installed.
    pub fn server_bucket() -> Option<Self> {
        if find_versitygw().is_none() {
            report_skipped(
                "buckets of a real server: versitygw is not there (tools/packages test)",
            );
            return None;
        }
        let draconis = Draconis::new();
        let root = draconis.make_dir("served");
        std::fs::create_dir(root.join("bucket")).unwrap();
        // A port that was free a moment ago.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let server = S3Server::start(root, port);
        let environment = vec![
            ("AWS_ACCESS_KEY_ID", "access".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "secret-of-a-test".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}")),
        ];
        let address = "s3://bucket/a/prefix".to_owned();
        Some(Self { draconis, address, environment, server })
    }

    /// Returns the same location for another machine, with its own runtime directory.
    pub fn for_other_machine(&self) -> Self {
        let Self { address, environment, .. } = self;
        let draconis = Draconis::new();
        let (address, environment) = (address.clone(), environment.clone());
        Self { draconis, address, environment, server: None }
    }

    /// Returns the environment of programs that access the location.
    pub fn environment(&self) -> &[(&'static str, String)] {
        &self.environment
    }

    /// Stops the server; it keeps the data that it has received.
    pub fn stop_server(&mut self) -> impl FnOnce(&mut Self) + use<> {
        let server = self.server.take().expect("a place with a server");
        let (root, port) = (server.root.clone(), server.port);
        drop(server);
        move |place| place.server = S3Server::start(root, port)
    }

    /// Sends a signal to the server.
    pub fn signal_server(&self, signal: rustix::process::Signal) {
        let server = self.server.as_ref().expect("a place with a server");
        let pid = rustix::process::Pid::from_child(&server.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Returns the name of a disk in the store.
    pub fn disk_name(&self, name: &str) -> String {
        format!("{}#{name}", self.address)
    }

    /// Mounts a disk on a new directory, with additional arguments.
    pub fn mount(&self, disk: &str, at: &str, more: &[&str]) -> PathBuf {
        let (disk, at) = (self.disk_name(disk), self.draconis.make_dir(at));
        let arguments = [&["mount"], more, &[&disk, at.to_str().unwrap()]].concat();
        self.run_ok(&arguments);
        at
    }

    pub fn unmount(&self, at: &Path) {
        // A child of another test may hold our files between its fork and its exec.
        wait_until("it is not busy", || {
            let output = self.run(&["umount", at.to_str().unwrap()]);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() || errors.contains("busy"), "{errors}");
            output.status.success()
        });
    }

    /// Checks the store and a volume, finally with e2fsck.
    pub fn check_store_and_volume(&self, disk: &str) {
        self.run_ok(&["check", &self.disk_name(disk)]);
        let image = self.draconis.path("judged.img");
        self.run_ok(&["store", "get", &self.address, disk, image.to_str().unwrap()]);
        if has_tool("volumes in buckets", "e2fsck") {
            super::volume::run_e2fsck(&image);
        }
        self.run_ok(&["store", "check", &self.address]);
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.draconis.command();
        command.envs(self.environment.iter().cloned()).args(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    pub fn run_ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    pub fn run_failing(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {errors}");
        errors
    }
}
