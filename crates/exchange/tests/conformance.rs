//! Conformance suite, run over every transport.

mod common;

use std::time::{Duration, Instant};

use common::{
    TEST_TIMEOUT, name, test_deadline,
    transport::{Lanes, Processes, Role, TestTransport, Threads, run_if_child},
};
use draconis_exchange::{
    channel::{ChannelError, RpcClient},
    contract::{
        List, Node, Refusal,
        directory::{self, Directory, EntryReader},
        disk::{self, Disk},
        file::{self, File},
        tree,
        volume::{self, Volume},
    },
};

#[test]
fn child_entry() {
    run_if_child();
}

/// Runs every test over every transport.
macro_rules! conform {
    ($($module:ident: $transport:ident),*; $tests:tt) => {
        $(conform!(@ $module $transport $tests);)*
    };
    (@ $module:ident $transport:ident { $($test:ident),* $(,)? }) => {
        mod $module {
            $(
                #[test]
                fn $test() {
                    super::$test::<super::$transport>();
                }
            )*
        }
    };
}

conform! {
    threads: Threads, lanes: Lanes, processes: Processes;
    {
        bound_file_is_readable,
        client_follows_symlinks_up_to_limit,
        bound_directory_is_listed,
        refused_endpoint_is_returned,
        request_buffers_return_with_reply,
        reply_sent_before_close_is_received,
        unread_request_attachments_are_reclaimed,
        attachments_sent_to_closed_server_are_reclaimed,
        late_reply_after_timeout_is_reclaimed,
        repeated_binds_reuse_lanes,
        client_state_follows_reply,
        peer_death_returns_closed_in_every_state,
    }
}

fn with_tree<T: TestTransport>(test: impl FnOnce(&T, &mut RpcClient<Directory>)) {
    let (transport, client) = T::start::<Directory>(Role::Tree);
    let mut caller = RpcClient::new(client, TEST_TIMEOUT);
    test(&transport, &mut caller);
    drop(caller);
    transport.finish();
}

fn bound_file_is_readable<T: TestTransport>() {
    with_tree::<T>(|transport, directory| {
        let ends = transport.pair();
        let (mut hello, attributes) =
            tree::open(directory, Node::ROOT, b"hello", ends, TEST_TIMEOUT).unwrap();
        assert_eq!(attributes.size_bytes, 12);
        let buffer = transport.block(4096);
        let ack = hello
            .call(file::Read { buffer, buffer_offset: 100, offset: 7, len: 1000, no_atime: false })
            .unwrap()
            .unwrap();
        assert_eq!(ack.len, 5);
        let mut bytes = [0; 5];
        ack.buffer.copy_out(100, &mut bytes);
        assert_eq!(&bytes, b"tree!");
        let nak = hello
            .call(file::Write {
                buffer: ack.buffer,
                buffer_offset: 0,
                offset: 0,
                len: 1,
                clear_privileges: false,
            })
            .unwrap()
            .unwrap_err();
        assert_eq!((nak.why, nak.buffer.len()), (Refusal::NotSupported, 4096));
        let buffer = nak.buffer;
        let beyond =
            file::Read { buffer, buffer_offset: 4000, offset: 0, len: 100, no_atime: false };
        assert_eq!(hello.call(beyond).unwrap().unwrap_err().why, Refusal::Invalid);
    });
}

fn client_follows_symlinks_up_to_limit<T: TestTransport>() {
    with_tree::<T>(|transport, directory| {
        let mut open = |path: &[u8]| {
            tree::open(directory, Node::ROOT, path, transport.pair(), TEST_TIMEOUT)
                .map(|(_, attributes)| attributes.node)
        };
        assert_eq!(open(b"/dir/../link"), Ok(Node(2)));
        assert_eq!(open(b"dir/loop"), Ok(Node(2)));
        assert_eq!(open(b"self"), Err(Refusal::TooManyLinks));
        assert_eq!(open(b"self/hello"), Err(Refusal::TooManyLinks));
        assert_eq!(open(b"hello/"), Err(Refusal::NotADirectory));
        assert_eq!(open(b"hello/x"), Err(Refusal::NotADirectory));
        assert_eq!(open(b"dir"), Err(Refusal::IsADirectory));
        assert_eq!(open(b"nothing"), Err(Refusal::NotFound));
    });
}

fn bound_directory_is_listed<T: TestTransport>() {
    with_tree::<T>(|transport, root| {
        let (client, server) = transport.pair::<Directory>();
        let room = transport.block(tree::MAX_PATH_BYTES);
        let end = directory::Endpoint::Directory(server);
        let (attributes, _) = tree::bind(root, Node::ROOT, b"dir", room, end).unwrap();
        let (reply, client) = client
            .call(
                directory::Lookup { parent: attributes.node, name: name("loop") },
                test_deadline(),
            )
            .unwrap();
        assert_eq!(reply.unwrap().attributes.node, Node(5));
        let message = directory::Enumerate {
            node: Node::ROOT,
            cookie: 0,
            buffer: transport.block(4096),
            with_attributes: true,
            no_atime: false,
        };
        let (reply, _) = client.call(message, test_deadline()).unwrap();
        let ack = reply.unwrap();
        let names: Vec<_> = EntryReader::new(&ack.buffer, ack.len)
            .unwrap()
            .map(|entry| String::from_utf8(entry.unwrap().name.as_bytes().to_vec()).unwrap())
            .collect();
        assert_eq!(names, ["hello", "dir", "link", "self"]);
    });
}

fn refused_endpoint_is_returned<T: TestTransport>() {
    with_tree::<T>(|transport, directory| {
        let (client, server) = transport.pair::<File>();
        let bind = |path: &[u8], end| {
            let mut room = transport.block(4096);
            room.copy_in(0, path);
            directory::Bind { from: Node::ROOT, path: room, len: path.len() as u32, end }
        };
        let end = directory::Endpoint::File(server);
        let nak = directory.call(bind(b"nothing", end)).unwrap().unwrap_err();
        // Binds the same endpoint again, to an existing file.
        directory.call(bind(b"hello", nak.end)).unwrap().unwrap();
        let (reply, _) = client.call(file::GetAttributes {}, test_deadline()).unwrap();
        assert_eq!(reply.unwrap().attributes.node, Node(2));
    });
}

fn request_buffers_return_with_reply<T: TestTransport>() {
    let (transport, client) = T::start::<Disk>(Role::CloseAfter(9));
    let blocks: Vec<_> = (0..64).map(|i| (i * 4096, transport.block(4096))).collect();
    let mut after = List::new();
    after.push(7).unwrap();
    let (blocks, ends) = (List::try_from(blocks).unwrap(), List::try_from(vec![64]).unwrap());
    let submit = disk::Submit { blocks, ends, after, mark: 0, durable: None, more: false };
    let (reply, client) = client.call(submit, test_deadline()).unwrap();
    let nak = reply.unwrap_err();
    assert_eq!((nak.why, nak.blocks.len()), (Refusal::ReadOnly, 64));
    assert!(
        nak.blocks
            .iter()
            .enumerate()
            .all(|(i, (at, block))| { *at == i as u64 * 4096 && block.len() == 4096 })
    );
    drop((nak, client));
    transport.finish();
}

fn read<T: TestTransport>(transport: &T) -> file::Read {
    file::Read {
        buffer: transport.block(4096),
        buffer_offset: 0,
        offset: 0,
        len: 4096,
        no_atime: false,
    }
}

fn reply_sent_before_close_is_received<T: TestTransport>() {
    for after in [1, 3] {
        let (transport, client) = T::start::<File>(Role::CloseAfter(after));
        let mut caller = RpcClient::new(client, TEST_TIMEOUT);
        for _ in 0..after {
            assert_eq!(caller.call(read(&transport)).unwrap().unwrap_err().why, Refusal::Io);
        }
        assert_eq!(caller.call(read(&transport)).unwrap_err(), ChannelError::Closed);
        assert_eq!(caller.call(read(&transport)).unwrap_err(), ChannelError::Closed);
        transport.finish();
    }
}

fn unread_request_attachments_are_reclaimed<T: TestTransport>() {
    let (transport, directory) = T::start::<Directory>(Role::CloseAfter(0));
    let (client, server) = transport.pair::<File>();
    // The endpoint is in a request that the server drops unread when it closes.
    let waiting = client.send(read(&transport));
    let path = transport.block(4096);
    let end = directory::Endpoint::File(server);
    let bind = directory::Bind { from: Node::ROOT, path, len: 0, end };
    assert_eq!(directory.call(bind, test_deadline()).unwrap_err(), ChannelError::Closed);
    assert_eq!(waiting.receive(test_deadline()).unwrap_err(), ChannelError::Closed);
    transport.finish();
}

fn attachments_sent_to_closed_server_are_reclaimed<T: TestTransport>() {
    let (transport, directory) = T::start::<Directory>(Role::Close);
    // Time to close; if it takes longer, the request stays unread.
    std::thread::sleep(Duration::from_millis(100));
    let (client, server) = transport.pair::<File>();
    let waiting = client.send(read(&transport));
    let path = transport.block(4096);
    let end = directory::Endpoint::File(server);
    let bind = directory::Bind { from: Node::ROOT, path, len: 0, end };
    assert_eq!(directory.call(bind, test_deadline()).unwrap_err(), ChannelError::Closed);
    assert_eq!(waiting.receive(test_deadline()).unwrap_err(), ChannelError::Closed);
    transport.finish();
}

fn late_reply_after_timeout_is_reclaimed<T: TestTransport>() {
    let (transport, client) = T::start::<File>(Role::Silent(Duration::from_millis(150)));
    // A child process takes time to start: it must have begun to be silent.
    let mut waiting = client.send(read(&transport));
    // Much later than the deadline, the reply would arrive first.
    let until = Instant::now() + Duration::from_millis(20);
    assert_eq!(waiting.wait(until), Err(ChannelError::Timeout));
    assert_eq!(waiting.receive(Instant::now()).unwrap_err(), ChannelError::Timeout);
    std::thread::sleep(Duration::from_millis(400));
    transport.finish();
}

fn repeated_binds_reuse_lanes<T: TestTransport>() {
    with_tree::<T>(|transport, directory| {
        for _ in 0..1000 {
            let ends = retry_until_some(|| {
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| transport.pair())).ok()
            });
            let (mut hello, _) =
                tree::open(directory, Node::ROOT, b"hello", ends, TEST_TIMEOUT).unwrap();
            let ack = hello.call(read(transport)).unwrap().unwrap();
            assert_eq!(ack.len, 12);
        }
    });
}

/// Retries: the peer closes its endpoints a little after we close ours.
fn retry_until_some<T>(mut f: impl FnMut() -> Option<T>) -> T {
    let deadline = test_deadline();
    loop {
        match f() {
            Some(value) => return value,
            None if Instant::now() > deadline => panic!("never"),
            None => std::thread::yield_now(),
        }
    }
}

fn client_state_follows_reply<T: TestTransport>() {
    use draconis_exchange::channel::Reply;
    let (transport, client) = T::start::<Volume>(Role::CloseAfter(9));
    let mount = volume::Mount { options: transport.block(100), len: 0 };
    let running = match client.send(mount).receive(test_deadline()).unwrap() {
        Reply::Ack(ack, running) => {
            assert!(ack.mounted.read_only);
            running
        }
        Reply::Nak(nak, _) => panic!("{}", nak.why.why),
    };
    let running = match running.send(volume::Unmount {}).receive(test_deadline()).unwrap() {
        Reply::Nak(nak, running) => {
            assert_eq!(nak.why, Refusal::Busy);
            running
        }
        Reply::Ack(..) => panic!("busy volumes stay"),
    };
    let status = volume::Status { buffer: transport.block(64) };
    let (reply, _) = running.call(status, test_deadline()).unwrap();
    assert_eq!(reply.unwrap_err().buffer.len(), 64);
    transport.finish();
}

/// Sends each message to a peer that dies of it, in the state after the first calls.
macro_rules! dies {
    ($T:ty, $C:ty, $transport:ident, $answered:expr, |$client:ident| $first:expr; $($message:expr),* $(,)?) => {$(
        let ($transport, $client) = <$T>::start::<$C>(Role::DieAt($answered));
        let $client = $first;
        let told = $client.send($message).receive(test_deadline()).map(drop);
        assert_eq!(told, Err(ChannelError::Closed), "{}", stringify!($message));
        $transport.finish();
    )*};
}

fn peer_death_returns_closed_in_every_state<T: TestTransport>() {
    use draconis_exchange::contract::{AttributeChange, AttributeName, FallocateMode};
    let (node, parent, name) = (Node(9), Node::ROOT, name("x"));
    let attribute = AttributeName::new(b"user.x/y").unwrap();
    dies! { T, File, t, 1, |client| client.call(read(&t), test_deadline()).unwrap().1;
        read(&t),
        file::Write {
            buffer: t.block(4096), buffer_offset: 0, offset: 0, len: 1, clear_privileges: true,
        },
        file::Fallocate { offset: 0, len: 1, how: FallocateMode::PunchHole },
        file::GetAttributes {},
        file::Seek { offset: 0, hole: true },
        file::Sync { data_only: true },
    }
    dies! { T, Disk, t, 0, |client| client;
        disk::Properties {},
        disk::Read { at_bytes: 0, buffer: t.block(65536), urgent: true },
        disk::Submit {
            blocks: List::try_from(vec![(0, t.block(4096)), (4096, t.block(9))]).unwrap(),
            ends: List::new(),
            after: List::new(),
            mark: 0,
            durable: None,
            more: true,
        },
        disk::Settle { ticket: 1 },
        disk::Wait { ticket: 1 },
    }
    dies! { T, Volume, t, 0, |client| client;
        volume::Mount { options: t.block(10), len: 0 },
    }
    dies! { T, Volume, t, 1, |client| {
            let mount = volume::Mount { options: t.block(10), len: 0 };
            match client.send(mount).receive(test_deadline()).unwrap() {
                draconis_exchange::channel::Reply::Ack(_, running) => running,
                draconis_exchange::channel::Reply::Nak(nak, _) => panic!("{}", nak.why.why),
            }
        };
        volume::Status { buffer: t.block(10) },
        volume::Unmount {},
    }
    dies! { T, Directory, t, 0, |client| client;
        directory::Bind {
            from: node, path: t.block(10), len: 0, end: directory::Endpoint::File(t.pair().1),
        },
        directory::Bind {
            from: node, path: t.block(10), len: 0, end: directory::Endpoint::Directory(t.pair().1),
        },
        directory::Lookup { parent, name },
        directory::GetAttributes { node },
        directory::Enumerate { node, cookie: 0, buffer: t.block(10), with_attributes: false, no_atime: false },
        directory::ReadLink { node, buffer: t.block(10) },
        directory::GetXattr { node, name: attribute, buffer: t.block(0) },
        directory::ListXattr { node, buffer: t.block(10) },
        directory::Create { parent, name, mode: 0, umask: 0, uid: 0, gid: 0, device: (0, 0) },
        directory::MakeDirectory { parent, name, mode: 0, umask: 0, uid: 0, gid: 0 },
        directory::Symlink { parent, name, target: t.block(10), len: 0, uid: 0, gid: 0 },
        directory::Link { node, parent, name },
        directory::Unlink { parent, name },
        directory::RemoveDirectory { parent, name },
        directory::Rename { from: parent, name, to: parent, new_name: name, flags: 0, uid: 0, gid: 0 },
        directory::SetAttributes { node, change: AttributeChange::default() },
        directory::SetXattr { node, name: attribute, value: t.block(10), len: 0, flags: 0, clear_setgid: false },
        directory::RemoveXattr { node, name: attribute },
        directory::SetFlags { node, flags: 0x10 },
        directory::SyncVolume {},
    }
}
