//! One suite for both forms of a worker: a thread of this process, and a confined process. The
//! requests go through the same typed channels.

mod common;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use draconis_device::{FileOptions, OpenedFile};
use draconis_exchange::channel::session::{SessionConfig, accept, offer};
use draconis_exchange::channel::{self, ChannelError, Client, RpcClient, Server};
use draconis_exchange::contract::directory::{
    self, Directory, EntryReader, Enumerate, GetXattr, Lookup, ReadLink, Unlink,
};
use draconis_exchange::contract::file::{self, CachingReader, File, Seek};
use draconis_exchange::contract::{
    AttributeChange, AttributeName, Attributes, FileType, Name, Node, Refusal, tree,
};
use draconis_exchange::heap::Block;
use draconis_service::local::LocalVolume;
use draconis_service::options::MountOptions;
use draconis_service::sandbox::{SandboxProfile, confine};
use draconis_service::volume;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

const REPLY_TIMEOUT: Duration = Duration::from_secs(20);

/// A connection to a volume, and the buffers that it transfers without a copy.
struct VolumeConnection {
    directory: RpcClient<Directory>,
    pair: Box<dyn Fn() -> (Client<File>, Server<File>)>,
    block: Box<dyn Fn(usize) -> Block>,
    /// Allocates blocks for callers that can do with fewer.
    spare: Arc<dyn Fn(usize) -> Option<Block> + Send + Sync>,
    child: Option<Child>,
}

impl Drop for VolumeConnection {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn thread(image: &Path) -> VolumeConnection {
    let local = LocalVolume::open(image, &MountOptions::default(), REPLY_TIMEOUT).unwrap();
    VolumeConnection {
        directory: local.directory().unwrap(),
        pair: Box::new(channel::pair),
        block: Box::new(Block::private),
        spare: Arc::new(|len| Some(Block::unallocated(len))),
        child: None,
    }
}

fn process(image: &Path) -> VolumeConnection {
    let (offer, socket) = offer(&SessionConfig::default()).unwrap();
    let child = common::child_command("worker", image).stdin(socket).spawn().unwrap();
    let pid = Pid::from_child(&child);
    let session = offer.start(pidfd_open(pid, PidfdFlags::empty()).unwrap());
    let (lanes, heap, spare) = (session.clone(), session.clone(), session.clone());
    VolumeConnection {
        directory: RpcClient::new(session.client(0).unwrap(), REPLY_TIMEOUT),
        // A lane is reusable only after its server has noticed that it was closed.
        pair: Box::new(move || {
            let until = Instant::now() + REPLY_TIMEOUT;
            loop {
                match lanes.pair() {
                    Err(Refusal::Quota) if Instant::now() < until => {
                        sleep(Duration::from_millis(1))
                    }
                    pair => return pair.unwrap(),
                }
            }
        }),
        block: Box::new(move |len| heap.allocate_block(len).unwrap()),
        spare: Arc::new(move |len| spare.allocate_block(len)),
        child: Some(child),
    }
}

#[test]
fn child_entry() {
    if common::child_role().is_none() {
        return;
    }
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let image = std::fs::File::open(common::child_path()).unwrap();
    let options = FileOptions { write: false, direct: true, uring: false };
    let image = OpenedFile::new(image.into(), options).unwrap();
    let session = accept(&socket, Instant::now() + REPLY_TIMEOUT).unwrap();
    let confinement = confine(&SandboxProfile::Worker, None).unwrap();
    assert!(confinement.seccomp && confinement.no_capabilities);
    let tree = volume::open(Arc::new(image.start()), &[], &MountOptions::default()).unwrap();
    let served = tree::serve_tree(session.server(0).unwrap(), &tree, REPLY_TIMEOUT);
    std::process::exit(i32::from(served.is_err()));
}

macro_rules! both_forms {
    ($($test:ident),* $(,)?) => { both_forms!(@ thread $($test)*); both_forms!(@ process $($test)*); };
    (@ $form:ident $($test:ident)*) => {
        mod $form {
            $(
                #[test]
                fn $test() {
                    super::$test(super::$form);
                }
            )*
        }
    };
}

both_forms! {
    all_files_are_listed_and_read,
    links_attributes_and_holes_are_reported,
    invalid_operations_are_refused_with_reason,
    files_are_read_concurrently,
    caching_reader_returns_same_bytes,
    server_ends_when_client_closes,
}

type ConnectVolume = fn(&Path) -> VolumeConnection;

/// A directory tree, and a volume that contains it.
struct TestVolume {
    dir: tempfile::TempDir,
}

impl TestVolume {
    fn new() -> Self {
        let volume = Self { dir: tempfile::tempdir().unwrap() };
        let top = volume.tree_dir();
        std::fs::create_dir_all(top.join("deep/er")).unwrap();
        std::fs::write(top.join("hello"), "Hello, volume!").unwrap();
        std::fs::write(top.join("empty"), "").unwrap();
        let long: Vec<u8> = (0..200_000u32).flat_map(u32::to_le_bytes).collect();
        std::fs::write(top.join("deep/long"), long).unwrap();
        for i in 0..200 {
            std::fs::write(top.join(format!("deep/er/file {i:03}")), format!("{i}")).unwrap();
        }
        std::os::unix::fs::symlink("deep/../hello", top.join("link")).unwrap();
        std::os::unix::fs::symlink("self", top.join("self")).unwrap();
        let sparse = std::fs::File::create(top.join("sparse")).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&sparse, b"data", 1 << 20).unwrap();
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(top.join("hello"), "user.with/slash", b"value", flags).unwrap();
        let made = Command::new("mke2fs")
            .args(["-q", "-F", "-t", "ext2", "-b", "1024", "-d"])
            .args([&top, &volume.image_path()])
            .arg("8M")
            .output();
        assert!(made.expect("mke2fs of e2fsprogs is needed").status.success());
        volume
    }

    fn tree_dir(&self) -> PathBuf {
        self.dir.path().join("tree")
    }

    fn image_path(&self) -> PathBuf {
        self.dir.path().join("image")
    }
}

fn name(name: &str) -> Name {
    Name::new(name.as_bytes()).unwrap()
}

impl VolumeConnection {
    fn lookup(&mut self, parent: Node, of: &str) -> Result<Attributes, Refusal> {
        let asked = self.directory.call(Lookup { parent, name: name(of) }).unwrap();
        asked.map(|ack| ack.attributes).map_err(|nak| nak.why)
    }

    /// Lists names and attributes of all entries of a directory.
    fn list(&mut self, node: Node) -> Vec<(String, Attributes)> {
        let (mut found, mut cookie, mut buffer) = (vec![], 0, (self.block)(1024));
        loop {
            let message =
                Enumerate { node, cookie, buffer, with_attributes: true, no_atime: false };
            let ack = self.directory.call(message).unwrap().unwrap();
            if ack.len == 0 {
                return found;
            }
            for entry in EntryReader::new(&ack.buffer, ack.len).unwrap() {
                let entry = entry.unwrap();
                cookie = entry.cookie;
                let name = String::from_utf8(entry.name.as_bytes().to_vec()).unwrap();
                found.push((name, entry.attributes.unwrap()));
            }
            buffer = ack.buffer;
        }
    }

    fn open(&mut self, path: &str) -> Result<(RpcClient<File>, Attributes), Refusal> {
        let ends = (self.pair)();
        tree::open(&mut self.directory, Node::ROOT, path.as_bytes(), ends, REPLY_TIMEOUT)
    }

    fn read(&mut self, path: &str) -> Result<Vec<u8>, Refusal> {
        let (mut file, attributes) = self.open(path)?;
        let bytes = read_whole_file(&mut file, (self.block)(4096));
        assert_eq!(bytes.len() as u64, attributes.size_bytes);
        Ok(bytes)
    }
}

fn read_whole_file(file: &mut RpcClient<File>, mut buffer: Block) -> Vec<u8> {
    let mut bytes = vec![];
    loop {
        let offset = bytes.len() as u64;
        // Not at the buffer's start, to test that its offset is honoured.
        let read = file::Read { buffer, buffer_offset: 96, offset, len: 4000, no_atime: false };
        let ack = file.call(read).unwrap().unwrap();
        let mut piece = vec![0; ack.len as usize];
        ack.buffer.copy_out(96, &mut piece);
        bytes.extend(piece);
        if ack.len < 4000 {
            return bytes;
        }
        buffer = ack.buffer;
    }
}

/// Returns every path below `top`, with mode and contents.
fn read_host_tree(top: &Path) -> BTreeMap<String, (u32, Vec<u8>)> {
    use std::os::unix::ffi::OsStringExt;
    use std::os::unix::fs::MetadataExt;
    let (mut found, mut stack) = (BTreeMap::new(), vec![top.to_path_buf()]);
    while let Some(dir) = stack.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let below = path.strip_prefix(top).unwrap().to_str().unwrap().to_string();
            let metadata = std::fs::symlink_metadata(&path).unwrap();
            let bytes = if metadata.is_symlink() {
                std::fs::read_link(&path).unwrap().into_os_string().into_vec()
            } else if metadata.is_dir() {
                stack.push(path);
                vec![]
            } else {
                std::fs::read(&path).unwrap()
            };
            found.insert(below, (metadata.mode(), bytes));
        }
    }
    found
}

fn all_files_are_listed_and_read(make: ConnectVolume) {
    let volume = TestVolume::new();
    let mut form = make(&volume.image_path());
    let (mut found, mut stack) = (BTreeMap::new(), vec![(String::new(), Node::ROOT)]);
    while let Some((dir, node)) = stack.pop() {
        for (name, attributes) in form.list(node) {
            let path = if dir.is_empty() { name } else { format!("{dir}/{name}") };
            if path == "lost+found" {
                continue;
            }
            let bytes = match attributes.kind {
                FileType::Directory => {
                    stack.push((path.clone(), attributes.node));
                    vec![]
                }
                FileType::Symlink => {
                    let buffer = (form.block)(4096);
                    let asked = form.directory.call(ReadLink { node: attributes.node, buffer });
                    let ack = asked.unwrap().unwrap();
                    let mut target = vec![0; ack.len as usize];
                    ack.buffer.copy_out(0, &mut target);
                    target
                }
                _ => form.read(&path).unwrap(),
            };
            found.insert(path, (attributes.mode, bytes));
        }
    }
    let expected = read_host_tree(&volume.tree_dir());
    assert!(expected.len() > 200);
    assert!(found.keys().eq(expected.keys()), "{:?}", found.keys());
    for (path, theirs) in &expected {
        assert!(found[path] == *theirs, "{path}");
    }
}

fn links_attributes_and_holes_are_reported(make: ConnectVolume) {
    let volume = TestVolume::new();
    let mut form = make(&volume.image_path());
    assert_eq!(form.read("link").unwrap(), b"Hello, volume!");
    assert_eq!(form.read("self").unwrap_err(), Refusal::TooManyLinks);
    let node = form.lookup(Node::ROOT, "hello").unwrap().node;
    let slash = AttributeName::new(b"user.with/slash").unwrap();
    let asked = GetXattr { node, name: slash, buffer: (form.block)(64) };
    let ack = form.directory.call(asked).unwrap().unwrap();
    let mut value = [0; 5];
    ack.buffer.copy_out(0, &mut value);
    assert_eq!((ack.len, &value), (5, b"value"));
    let (mut sparse, _) = form.open("sparse").unwrap();
    let mut seek = |offset, hole| sparse.call(Seek { offset, hole }).unwrap().unwrap().offset;
    let end = (1 << 20) + 4;
    assert_eq!((seek(0, true), seek(0, false)), (Some(0), Some(1 << 20)));
    assert_eq!((seek(1 << 20, true), seek(end, true), seek(end, false)), (Some(end), None, None));
}

fn invalid_operations_are_refused_with_reason(make: ConnectVolume) {
    let volume = TestVolume::new();
    let mut form = make(&volume.image_path());
    assert_eq!(form.lookup(Node::ROOT, "nothing").unwrap_err(), Refusal::NotFound);
    assert_eq!(form.lookup(Node(u64::MAX), "x").unwrap_err(), Refusal::NotFound);
    assert_eq!(form.open("deep").unwrap_err(), Refusal::IsADirectory);
    assert_eq!(form.open("hello/x").unwrap_err(), Refusal::NotADirectory);
    let unlink = Unlink { parent: Node::ROOT, name: name("hello") };
    assert_eq!(form.directory.call(unlink).unwrap().unwrap_err().why, Refusal::ReadOnly);
    let (mut hello, _) = form.open("hello").unwrap();
    let buffer = (form.block)(4096);
    let beyond = file::Read { buffer, buffer_offset: 4000, offset: 0, len: 97, no_atime: false };
    let nak = hello.call(beyond).unwrap().unwrap_err();
    assert_eq!((nak.why, nak.buffer.len()), (Refusal::Invalid, 4096));
    let write = file::Write {
        buffer: nak.buffer,
        buffer_offset: 0,
        offset: 0,
        len: 1,
        clear_privileges: false,
    };
    let nak = hello.call(write).unwrap().unwrap_err();
    assert_eq!((nak.why, nak.buffer.len()), (Refusal::ReadOnly, 4096));
    // The refusals have not broken the channel.
    assert_eq!(form.read("hello").unwrap(), b"Hello, volume!");
}

fn files_are_read_concurrently(make: ConnectVolume) {
    let volume = TestVolume::new();
    let mut form = make(&volume.image_path());
    let paths = ["hello", "deep/long", "sparse", "deep/er/file 007"];
    let files: Vec<_> =
        paths.iter().map(|path| (form.open(path).unwrap().0, (form.block)(4096))).collect();
    std::thread::scope(|scope| {
        for ((mut file, buffer), path) in files.into_iter().zip(paths) {
            let expected = std::fs::read(volume.tree_dir().join(path)).unwrap();
            scope.spawn(move || assert!(read_whole_file(&mut file, buffer) == expected, "{path}"));
        }
    });
}

fn caching_reader_returns_same_bytes(make: ConnectVolume) {
    let volume = TestVolume::new();
    let mut form = make(&volume.image_path());
    for path in ["hello", "deep/long", "sparse"] {
        let expected = std::fs::read(volume.tree_dir().join(path)).unwrap();
        let end = form.open(path).unwrap().0.into_client().unwrap();
        let blocks = form.spare.clone();
        // More blocks than a session has.
        let mut reader = CachingReader::new(end, REPLY_TIMEOUT, 16, move |len| blocks(len));
        for len in [expected.len() + 9, 1, 4000, 77_777] {
            // Not every byte for length 1.
            let most = if len == 1 { 300 } else { expected.len() };
            for at in (0..most.min(expected.len())).step_by(len) {
                let mut into = vec![0; len];
                let read = reader.read(at as u64, &mut into).unwrap();
                let there = &expected[at..];
                assert!(into[..read] == there[..there.len().min(len)], "{path} at {at}");
            }
        }
    }
}

fn server_ends_when_client_closes(make: ConnectVolume) {
    let volume = TestVolume::new();
    let mut form = make(&volume.image_path());
    let (mut hello, _) = form.open("hello").unwrap();
    let (other, _) = channel::pair();
    let Some(root) =
        std::mem::replace(&mut form.directory, RpcClient::new(other, REPLY_TIMEOUT)).into_client()
    else {
        panic!("the channel is lost");
    };
    drop(root.send(directory::Close {}));
    // Endpoints bound through it stay alive, and keep the volume open.
    let asked = hello.call(file::GetAttributes {}).unwrap().unwrap();
    assert_eq!(asked.attributes.size_bytes, 14);
    drop(hello);
    if let Some(mut child) = form.child.take() {
        assert!(child.wait().unwrap().success());
    }
    let again = form.directory.call(directory::GetAttributes { node: Node::ROOT });
    assert_eq!(again.unwrap_err(), ChannelError::Closed);
}

#[test]
fn volume_is_written_through_channels() {
    let volume = TestVolume::new();
    let image = volume.image_path();
    let local =
        LocalVolume::open_for_writing(&image, &MountOptions::default(), REPLY_TIMEOUT).unwrap();
    let mut directory = local.directory().unwrap();
    let create = directory::Create {
        parent: Node::ROOT,
        name: name("new"),
        mode: 0o100_666,
        umask: 0o027,
        uid: 7,
        gid: 8,
        device: (0, 0),
    };
    let made = directory.call(create).unwrap().unwrap().attributes;
    assert_eq!((made.mode, made.uid, made.gid, made.links), (0o100_640, 7, 8, 1));
    let pair = channel::pair();
    let (mut file, _) =
        tree::open(&mut directory, Node::ROOT, b"new", pair, REPLY_TIMEOUT).unwrap();
    let mut buffer = Block::private(200_000);
    buffer.copy_in(5, &[7; 190_000]);
    let clear_privileges = false;
    let write = file::Write { buffer, buffer_offset: 5, offset: 3, len: 190_000, clear_privileges };
    assert_eq!(file.call(write).unwrap().unwrap().len, 190_000);
    // A caching reader of the same file sees each change at once.
    let pair = channel::pair();
    let (end, _) = tree::open(&mut directory, Node::ROOT, b"new", pair, REPLY_TIMEOUT).unwrap();
    let end = end.into_client().unwrap();
    let mut reader = CachingReader::new(end, REPLY_TIMEOUT, 4, |len| Some(Block::unallocated(len)));
    for round in 0..40u8 {
        let mut into = [0; 9];
        for _ in 0..3 {
            assert_eq!(reader.read(189_996, &mut into), Ok(7));
        }
        let expected = if round == 0 { 7 } else { 100 + round - 1 };
        assert_eq!(into[..7], [expected; 7]);
        let mut buffer = Block::private(9);
        buffer.copy_in(0, &[100 + round; 7]);
        let write =
            file::Write { buffer, buffer_offset: 0, offset: 189_996, len: 7, clear_privileges };
        assert_eq!(file.call(write).unwrap().unwrap().len, 7);
    }
    let shorter = AttributeChange { size_bytes: Some(190_000), ..AttributeChange::default() };
    let inode = draconis_ext::InodeNumber(made.node.0 as u32);
    local.tree().volume().set_attributes(inode, &shorter).unwrap();
    assert_eq!(reader.read(189_996, &mut [0; 9]), Ok(4));
    let mut buffer = Block::private(3);
    buffer.copy_in(0, &[7; 3]);
    let write = file::Write { buffer, buffer_offset: 0, offset: 190_000, len: 3, clear_privileges };
    assert_eq!(file.call(write).unwrap().unwrap().len, 3);
    let rename = directory::Rename {
        from: Node::ROOT,
        name: name("new"),
        to: Node::ROOT,
        new_name: name("hello"),
        flags: directory::RENAME_NO_REPLACE,
        uid: 0,
        gid: 0,
    };
    assert_eq!(directory.call(rename).unwrap().unwrap_err().why, Refusal::Exists);
    // An unlinked file exists as long as an endpoint of it.
    let unlink = Unlink { parent: Node::ROOT, name: name("new") };
    directory.call(unlink).unwrap().unwrap();
    let read = file::Read {
        buffer: Block::private(4096),
        buffer_offset: 0,
        offset: 189_999,
        len: 4096,
        no_atime: false,
    };
    let ack = file.call(read).unwrap().unwrap();
    assert_eq!((ack.len, ack.buffer.bytes().unwrap()[3]), (4, 7));
    file.call(file::Sync { data_only: false }).unwrap().unwrap();
    drop((file, reader));
    let gone = || local.tree().volume().attributes(draconis_ext::InodeNumber(made.node.0 as u32));
    let until = Instant::now() + REPLY_TIMEOUT;
    while gone().is_ok_and(|found| found.links == 0 && found.size_bytes > 0) {
        assert!(Instant::now() < until, "it lives on");
        std::thread::sleep(Duration::from_millis(5));
    }
    local.tree().close().unwrap();
    let late = directory::Unlink { parent: Node::ROOT, name: name("hello") };
    assert_eq!(directory.call(late).unwrap().unwrap_err().why, Refusal::ReadOnly);
    drop((directory, local));
    let output = Command::new("e2fsck").arg("-fn").arg(&image).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
