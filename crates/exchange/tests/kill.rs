//! A server process is killed at any moment: its client gets an error, and every byte returns.

use std::time::{Duration, Instant};

use crate::common::{
    TEST_TIMEOUT, test_deadline,
    transport::{LANES, assert_all_blocks_returned, spawn_child},
};
use draconis_exchange::{
    channel::{ChannelError, RpcClient},
    contract::file::{self, CachingReader, File, ReadError},
};

/// Arguments of a child that serves [`common::transport::HelloFile`]; see `run_if_child`.
const HELLO_ROLE: &str = "File hello 0";

#[test]
fn call_after_idle_peer_death_returns_closed() {
    let (session, mut child) = spawn_child(HELLO_ROLE);
    let mut hello = RpcClient::new(session.client::<File>(0).unwrap(), TEST_TIMEOUT);
    // The child has started.
    assert!(hello.call(file::GetAttributes {}).unwrap().is_err());
    child.kill().unwrap();
    child.wait().unwrap();
    let buffer = session.allocate_block(4096).unwrap();
    let read = file::Read { buffer, buffer_offset: 0, offset: 0, len: 4096, no_atime: false };
    // Caused by the death: a deadline would be `Timeout`.
    assert_eq!(hello.call(read).unwrap_err(), ChannelError::Closed);
    assert!(session.is_dead());
    assert_all_blocks_returned(&session);
}

#[test]
fn reader_cache_is_invalid_after_peer_death() {
    let (session, mut child) = spawn_child(HELLO_ROLE);
    let (client, blocks) = (session.client::<File>(0).unwrap(), session.clone());
    let mut hello =
        CachingReader::new(client, TEST_TIMEOUT, 1, move |len| blocks.allocate_block(len));
    let mut into = [0; 20];
    for _ in 0..100 {
        assert_eq!(hello.read(7, &mut into), Ok(5));
    }
    assert_eq!(&into[..5], b"tree!");
    child.kill().unwrap();
    child.wait().unwrap();
    // No message is sent: the reader polls for liveness.
    let lost = std::iter::repeat_with(|| hello.read(7, &mut into)).find_map(Result::err);
    assert_eq!(lost, Some(ReadError::Lost(ChannelError::Closed)));
    drop(hello);
    session.wait_for_death(test_deadline()).unwrap();
    assert_all_blocks_returned(&session);
}

#[test]
fn slots_of_hung_peer_return_after_its_kill() {
    let (session, mut child) = spawn_child("File silent 60000");
    let client = session.client::<File>(0).unwrap();
    let buffer = session.allocate_block(4096).unwrap();
    let read = file::Read { buffer, buffer_offset: 0, offset: 0, len: 4096, no_atime: false };
    let soon = Instant::now() + Duration::from_millis(300); // time: a deadline is tested
    let lost = client.call(read, soon).unwrap_err();
    assert_eq!(lost, ChannelError::Timeout);
    assert_eq!(session.heap_usage().exported_bytes, 4096, "the peer may still write there");
    child.kill().unwrap();
    session.wait_for_death(test_deadline()).unwrap();
    assert_all_blocks_returned(&session);
    child.wait().unwrap();
}

#[test]
fn killing_peer_at_random_time_leaks_no_slots() {
    let mut seed = 0x2545_f491_4f6c_dd1du64;
    for _ in 0..25 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let kill_after = Duration::from_micros(seed >> 50);
        let (session, mut child) = spawn_child(HELLO_ROLE);
        let mut hello = RpcClient::new(session.client::<File>(0).unwrap(), TEST_TIMEOUT);
        assert!(hello.call(file::GetAttributes {}).unwrap().is_err());
        let killer = std::thread::spawn(move || {
            draconis_testkit::wait::pause("the kill comes at any moment", kill_after);
            child.kill().unwrap();
            child.wait().unwrap();
        });
        let told = loop {
            let buffer = session.allocate_block(4096).unwrap();
            let read =
                file::Read { buffer, buffer_offset: 0, offset: 0, len: 4096, no_atime: false };
            match hello.call(read) {
                Ok(reply) => assert_eq!(reply.unwrap().len, 12),
                Err(lost) => break lost,
            }
        };
        killer.join().unwrap();
        // Caused by the death: a deadline would be `Timeout`.
        assert_eq!(told, ChannelError::Closed);
        drop(hello);
        session.wait_for_death(test_deadline()).unwrap();
        assert_all_blocks_returned(&session);
    }
}

#[test]
fn peer_death_closes_all_lanes_without_leaks() {
    for round in 0..10 {
        let (session, mut child) = spawn_child(HELLO_ROLE);
        let open = |lane| RpcClient::new(session.client::<File>(lane).unwrap(), TEST_TIMEOUT);
        let mut callers: Vec<_> = (0..LANES).map(open).collect();
        assert!(callers.iter_mut().all(|hello| hello.call(file::GetAttributes {}).is_ok()));
        std::thread::scope(|scope| {
            for mut hello in callers {
                let session = &session;
                scope.spawn(move || {
                    for calls in 0.. {
                        let buffer = session.allocate_block(4096).unwrap();
                        let read = file::Read {
                            buffer,
                            buffer_offset: 0,
                            offset: 0,
                            len: 4096,
                            no_atime: false,
                        };
                        match hello.call(read) {
                            Ok(reply) => assert_eq!(reply.unwrap().len, 12),
                            Err(lost) => {
                                return assert_eq!(lost, ChannelError::Closed, "call {calls}");
                            }
                        }
                    }
                });
            }
            draconis_testkit::wait::pause(
                "the kill comes at any moment",
                Duration::from_millis(round * 3),
            );
            child.kill().unwrap();
        });
        child.wait().unwrap();
        session.wait_for_death(test_deadline()).unwrap();
        assert_all_blocks_returned(&session);
    }
}
