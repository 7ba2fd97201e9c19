//! Whatever is said arrives as it was said, in both encodings and however the bytes are cut; and no bytes of a peer bring a decoder down.
#![allow(clippy::unwrap_used)]

mod arbitrary;

use std::fmt::Debug;

use dsh_policy::codec::{self, Decode, Encode};
use dsh_policy::frame::{self, Decoder, FRAME_LIMIT};
use dsh_policy::plan::{FromHelper, ToHelper};
use dsh_policy::wire::{ClientMessage, Encoding, Hello, HelloReply, ServerMessage};
use dsh_policy::{BashExecRequest, BashRunResult};
use proptest::collection::vec;
use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

fn survives_binary<T: Encode + Decode<()> + PartialEq + Debug>(message: &T) {
    assert_eq!(
        &codec::from_binary::<T>(&codec::to_binary(message).unwrap()).unwrap(),
        message
    );
}

fn survives_json<T: Serialize + DeserializeOwned + PartialEq + Debug>(message: &T) {
    let json = codec::to_json(message).unwrap();
    assert_eq!(
        &codec::from_json::<T>(&json).unwrap(),
        message,
        "{}",
        String::from_utf8_lossy(&json)
    );
}

/// Through frames that arrive in pieces of `step` bytes.
fn payloads_in_pieces(stream: &[u8], step: usize) -> Vec<Vec<u8>> {
    let mut decoder = Decoder::new(FRAME_LIMIT);
    let mut payloads = Vec::new();
    for piece in stream.chunks(step) {
        decoder.push(piece);
        while let Some(payload) = decoder.next_payload().unwrap() {
            payloads.push(payload);
        }
    }
    assert!(!decoder.is_mid_frame());
    payloads
}

proptest! {
    #[test]
    fn what_a_client_says_arrives(message in arbitrary::client_message(), step in 1usize..64) {
        survives_binary(&message);
        survives_json(&message);
        for encoding in [Encoding::Bincode, Encoding::Json] {
            let payloads = payloads_in_pieces(&encoding.frame(&message).unwrap(), step);
            prop_assert_eq!(payloads.len(), 1);
            prop_assert_eq!(encoding.client_message(&payloads[0]).unwrap(), message.clone());
        }
    }

    #[test]
    fn what_the_daemon_says_arrives(message in arbitrary::server_message(), step in 1usize..64) {
        survives_binary(&message);
        survives_json(&message);
        for encoding in [Encoding::Bincode, Encoding::Json] {
            let payloads = payloads_in_pieces(&encoding.frame(&message).unwrap(), step);
            prop_assert_eq!(payloads.len(), 1);
            prop_assert_eq!(encoding.server_message(&payloads[0]).unwrap(), message.clone());
        }
    }

    #[test]
    fn what_daemon_and_helper_say_arrives(to in arbitrary::to_helper(), from in arbitrary::from_helper()) {
        survives_binary(&to);
        survives_binary(&from);
    }

    #[test]
    fn a_result_stands_by_itself_in_json(result in arbitrary::result()) {
        survives_json(&result);
    }

    #[test]
    fn arbitrary_bytes_are_an_error_or_a_message_but_never_a_panic(bytes in vec(any::<u8>(), 0..300)) {
        let _ = codec::from_binary::<ClientMessage>(&bytes);
        let _ = codec::from_binary::<ServerMessage>(&bytes);
        let _ = codec::from_binary::<ToHelper>(&bytes);
        let _ = codec::from_binary::<FromHelper>(&bytes);
        let _ = codec::from_json::<ClientMessage>(&bytes);
        let _ = codec::from_json::<ServerMessage>(&bytes);
        let _ = codec::from_json::<Hello>(&bytes);
        let _ = codec::from_json::<HelloReply>(&bytes);
        let mut decoder = Decoder::new(200);
        decoder.push(&bytes);
        while let Ok(Some(payload)) = decoder.next_payload() {
            prop_assert!(payload.len() <= 200);
        }
    }

    #[test]
    fn a_damaged_message_is_an_error_or_another_message_but_never_a_panic(
        message in arbitrary::client_message(), answer in arbitrary::server_message(), plan in arbitrary::to_helper(),
        position in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<prop::sample::Index>(),
    ) {
        let damage = |mut bytes: Vec<u8>| {
            let at = position.index(bytes.len());
            bytes[at] = byte;
            bytes.truncate(cut.index(bytes.len()) + 1);
            bytes
        };
        let _ = codec::from_binary::<ClientMessage>(&damage(codec::to_binary(&message).unwrap()));
        let _ = codec::from_json::<ClientMessage>(&damage(codec::to_json(&message).unwrap()));
        let _ = codec::from_binary::<ServerMessage>(&damage(codec::to_binary(&answer).unwrap()));
        let _ = codec::from_json::<ServerMessage>(&damage(codec::to_json(&answer).unwrap()));
        let _ = codec::from_binary::<ToHelper>(&damage(codec::to_binary(&plan).unwrap()));
    }

    #[test]
    fn a_request_never_shows_its_values(request in arbitrary::request(), secret in "[a-z]{24}") {
        let mut request = request;
        let hidden = Some([("NAME".into(), secret.as_str().into())].into());
        (request.env, request.dsh_env, request.ambient_env) = (hidden.clone(), hidden.clone(), hidden);
        request.stdin = Some(secret.as_str().into());
        request.command = secret.as_str().into();
        let shown = format!("{request:?}");
        prop_assert!(!shown.contains(&secret), "{}", shown);
    }
}

#[test]
fn several_messages_in_one_stream_come_out_in_order() {
    let stream: Vec<u8> = (0..5u64)
        .flat_map(|id| Encoding::Json.frame(&ClientMessage::Cancel { id }).unwrap())
        .collect();
    let ids: Vec<_> = payloads_in_pieces(&stream, 7)
        .iter()
        .map(|payload| Encoding::Json.client_message(payload).unwrap())
        .collect();
    assert_eq!(ids, (0..5).map(|id| ClientMessage::Cancel { id }).collect::<Vec<_>>());
}

#[test]
fn a_kind_of_a_newer_peer_and_its_new_fields_are_tolerated_in_json() {
    let newer = br#"{"type":"teleport","id":3,"to":"moon"}"#;
    assert_eq!(Encoding::Json.client_message(newer).unwrap(), ClientMessage::Unknown);
    assert_eq!(Encoding::Json.server_message(newer).unwrap(), ServerMessage::Unknown);
    let wider = br#"{"type":"cancel","id":3,"gently":true}"#;
    assert_eq!(
        Encoding::Json.client_message(wider).unwrap(),
        ClientMessage::Cancel { id: 3 }
    );
}

#[test]
fn a_name_that_is_not_text_has_a_form_in_json() {
    let mut request = BashExecRequest {
        command: "true".into(),
        ..BashExecRequest::default()
    };
    request.env = Some(
        [
            (b"\xff"[..].into(), "v".into()),
            ("base64:x".into(), "w".into()),
            ("A".into(), "x".into()),
        ]
        .into(),
    );
    let json = serde_json::to_value(&request).unwrap();
    assert_eq!(
        json["env"],
        serde_json::json!({"A": "x", "base64:/w==": "v", "base64:YmFzZTY0Ong=": "w"})
    );
    assert_eq!(serde_json::from_value::<BashExecRequest>(json).unwrap(), request);
    assert!(serde_json::from_str::<BashExecRequest>(r#"{"command":"true","env":{"base64:*":"v"}}"#).is_err());
}

/// The contract's example of a result, whose keys and order callers rely on, with the fields that we add.
const GOLDEN: &str = include_str!("golden/result.json");

#[test]
fn the_result_is_the_contract_s_json() {
    let result: BashRunResult = serde_json::from_str(GOLDEN).unwrap();
    assert_eq!(serde_json::to_string_pretty(&result).unwrap(), GOLDEN.trim_end());
    assert!(
        result
            .sandbox
            .confined
            .is_some_and(|confined| confined.denials.len() == 1)
    );
}

#[test]
fn a_frame_over_the_limit_cannot_be_made() {
    assert!(frame::encode(&vec![0; FRAME_LIMIT + 1]).is_err());
}
