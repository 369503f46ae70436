//! The kernel's side of a connection: messages over a socket that keeps message boundaries.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

pub const LOOKUP: u32 = 1;
pub const FORGET: u32 = 2;
pub const GETATTR: u32 = 3;
pub const MKDIR: u32 = 9;
pub const UNLINK: u32 = 10;
pub const OPEN: u32 = 14;
pub const READ: u32 = 15;
pub const WRITE: u32 = 16;
pub const FSYNC: u32 = 20;
pub const SETXATTR: u32 = 21;
pub const GETXATTR: u32 = 22;
pub const INIT: u32 = 26;
pub const OPENDIR: u32 = 27;
pub const CREATE: u32 = 35;
pub const IOCTL: u32 = 39;
pub const READDIRPLUS: u32 = 44;

/// The longest expected reply, in bytes.
const REPLY_BYTES: usize = 256 << 10;
/// Length of the header of a request, in bytes.
pub const REQUEST_HEADER_BYTES: usize = 40;
/// Length of the header of a reply, in bytes.
const REPLY_HEADER_BYTES: usize = 16;

/// A scripted kernel: the test chooses every byte.
pub struct ScriptedKernel {
    socket: OwnedFd,
    unique: u64,
    /// Received notifications: code and body.
    pub notices: VecDeque<(i32, Vec<u8>)>,
}

impl ScriptedKernel {
    /// Creates both sides: the kernel's, and the server's in place of the device.
    pub fn new() -> (Self, OwnedFd) {
        let (socket, device) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        (Self { socket, unique: 0, notices: VecDeque::new() }, device)
    }

    /// Sends a request; returns its id.
    pub fn send(&mut self, opcode: u32, node: u64, body: &[u8]) -> u64 {
        self.unique += 2;
        let message = encode_request(opcode, self.unique, node, body);
        self.send_bytes(&message);
        self.unique
    }

    /// Sends raw bytes.
    pub fn send_bytes(&self, message: &[u8]) {
        let sent = rustix::net::send(&self.socket, message, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(sent, message.len());
    }

    /// Receives the next reply: the id of its request, and a body or an errno.
    pub fn receive(&mut self) -> (u64, Result<Vec<u8>, i32>) {
        loop {
            let mut bytes = vec![0; REPLY_BYTES];
            let (n, _) =
                rustix::net::recv(&self.socket, &mut bytes[..], RecvFlags::empty()).unwrap();
            assert!(n >= REPLY_HEADER_BYTES, "a reply of {n} bytes");
            let word = |at: usize| u32::from_ne_bytes(*bytes[at..].first_chunk().unwrap());
            assert_eq!(word(0) as usize, n, "the length that a reply says");
            let unique = u64::from_ne_bytes(*bytes[8..].first_chunk().unwrap());
            let (code, body) = (word(4) as i32, bytes[REPLY_HEADER_BYTES..n].to_vec());
            match unique {
                0 => self.notices.push_back((code, body)),
                _ if code == 0 => return (unique, Ok(body)),
                _ => return (unique, Err(-code)),
            }
        }
    }

    /// Sends a request and receives its reply.
    pub fn call(&mut self, opcode: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
        let sent = self.send(opcode, node, body);
        let (unique, answer) = self.receive();
        assert_eq!(unique, sent, "a reply to another request");
        answer
    }

    pub fn read(&mut self, node: u64, offset: u64, len: u32) -> Result<Vec<u8>, i32> {
        self.call(
            READ,
            node,
            &[&[0; 8][..], &offset.to_ne_bytes(), &words_to_bytes(&[len, 0, 0, 0, 0, 0])].concat(),
        )
    }

    pub fn write(&mut self, node: u64, offset: u64, bytes: &[u8], flags: u32) -> Result<u32, i32> {
        let fixed = words_to_bytes(&[bytes.len() as u32, flags, 0, 0, 0, 0]);
        let body = [&[0; 8][..], &offset.to_ne_bytes(), &fixed, bytes].concat();
        self.call(WRITE, node, &body).map(|answer| u32_at(&answer, 0))
    }

    pub fn lookup(&mut self, parent: u64, name: &str) -> Result<Vec<u8>, i32> {
        self.call(LOOKUP, parent, &[name.as_bytes(), b"\0"].concat())
    }

    /// Creates and opens a file; returns its node number.
    pub fn create(&mut self, parent: u64, name: &str) -> Result<u64, i32> {
        let fixed = words_to_bytes(&[0o102, 0o100_644, 0o022, 0]);
        let answer = self.call(CREATE, parent, &[&fixed, name.as_bytes(), b"\0"].concat())?;
        Ok(u64_at(&answer, 0))
    }

    pub fn fsync(&mut self, node: u64) -> Result<(), i32> {
        self.call(FSYNC, node, &[0; 16]).map(drop)
    }
}

/// Encodes a request of user 1 and group 2.
pub fn encode_request(opcode: u32, unique: u64, node: u64, body: &[u8]) -> Vec<u8> {
    let len = (REQUEST_HEADER_BYTES + body.len()) as u32;
    let head = words_to_bytes(&[len, opcode]);
    [&head[..], &unique.to_ne_bytes(), &node.to_ne_bytes(), &words_to_bytes(&[1, 2, 3, 0]), body]
        .concat()
}

pub fn words_to_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(*bytes[at..].first_chunk().unwrap())
}

pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(*bytes[at..].first_chunk().unwrap())
}
