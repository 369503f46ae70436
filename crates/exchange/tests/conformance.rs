//! Conformance suite, run over every transport.

use std::time::{Duration, Instant};

use crate::common::{
    TEST_TIMEOUT, name, test_deadline,
    transport::{Lanes, Processes, Role, TestTransport, Threads},
};
use draconis_exchange::{
    channel::{ChannelError, RpcClient},
    contract::{
        List,
        directory::{self, Directory},
        disk::{self, Disk},
        file::{self, File},
        volume::{self, Volume},
    },
};
use draconis_types::{Node, Refusal};

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
        file_is_readable,
        request_buffers_return_with_reply,
        reply_sent_before_close_is_received,
        unanswered_request_buffers_are_reclaimed,
        buffers_sent_to_closed_server_are_reclaimed,
        late_reply_after_timeout_is_reclaimed,
        client_state_follows_reply,
        peer_death_returns_closed_in_every_state,
    }
}

fn file_is_readable<T: TestTransport>() {
    let (transport, client) = T::start::<File>(Role::Hello);
    let mut hello = RpcClient::new(client, TEST_TIMEOUT);
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
    let beyond = file::Read { buffer, buffer_offset: 4000, offset: 0, len: 100, no_atime: false };
    assert_eq!(hello.call(beyond).unwrap().unwrap_err().why, Refusal::Invalid);
    drop(hello);
    transport.finish();
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

fn unanswered_request_buffers_are_reclaimed<T: TestTransport>() {
    let (transport, client) = T::start::<File>(Role::CloseAfter(0));
    assert_eq!(client.call(read(&transport), test_deadline()).unwrap_err(), ChannelError::Closed);
    transport.finish();
}

fn buffers_sent_to_closed_server_are_reclaimed<T: TestTransport>() {
    let (transport, client) = T::start::<File>(Role::Close);
    // Time to close; if it takes longer, the request stays unread.
    draconis_testkit::wait::pause(
        "time to close; otherwise the request stays unread",
        Duration::from_millis(100),
    );
    assert_eq!(client.call(read(&transport), test_deadline()).unwrap_err(), ChannelError::Closed);
    transport.finish();
}

fn late_reply_after_timeout_is_reclaimed<T: TestTransport>() {
    let (transport, client) = T::start::<File>(Role::Silent(Duration::from_secs(3)));
    // A child process takes time to start: it must have begun to be silent.
    let mut waiting = client.send(read(&transport));
    // Much later than the deadline, the reply would arrive first.
    let until = Instant::now() + Duration::from_millis(20); // time: a deadline is tested
    assert_eq!(waiting.wait(until), Err(ChannelError::Timeout));
    let now = Instant::now(); // time: a deadline is tested
    assert_eq!(waiting.receive(now).unwrap_err(), ChannelError::Timeout);
    draconis_testkit::wait::pause(
        "the answer comes after the deadline",
        Duration::from_millis(3500),
    );
    transport.finish();
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
    use draconis_types::{AttributeChange, AttributeName, FallocateMode};
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
