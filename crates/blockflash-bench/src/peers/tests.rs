use super::*;
use crate::case::{Case, PeerCaseError};
use std::collections::BTreeSet;

/// A server made of a shell script: `$line` is the request.
fn fake(cases: &str) -> Command {
    let hello = concat!(
        r#"{"ok":true,"torch":"9.9","references":["dense"],"deterministic":["good"],"#,
        r#""peers":{"attention_fwd":["good","bad"],"bsr_matmul":["dense"]},"#,
        r#""absent":{"a":"no x","b":"no x","c":"no y"}}"#
    );
    let script = format!(
        "while read -r line; do case \"$line\" in *hello*) echo '{hello}';; {cases} *) echo \
         '{{\"ok\":true}}';; esac; done"
    );
    Command { program: "sh".into(), arguments: vec!["-c".into(), script.into()], verbose: false }
}

fn start(cases: &str, selection: &str) -> Peers {
    Peers::start(fake(cases), Selection::parse(selection), 0)
}

fn of(id: &str) -> Result<PeerCase, PeerCaseError> {
    id.parse::<Case>().unwrap().peer_case(3, &std::env::temp_dir())
}

fn case() -> PeerCase {
    of("b1_s8_h1_d8_full_bf16").unwrap()
}

const PREPARED: &str =
    r#"*prepare*) echo '{"ok":true,"verified":true,"rel_err":0.001,"settings":"s"}';;"#;
const WINDOWED: &str =
    r#"*window*) echo '{"ok":true,"us":5.5,"us_min":5.0,"us_max":6.0,"replays":9,"launches":4}';;"#;

#[test]
fn a_competitor_is_prepared_and_timed() {
    let mut peers = start(&format!("{PREPARED} {WINDOWED}"), "auto");
    assert_eq!(peers.of("attention_fwd"), ["good", "bad"]);
    assert!(peers.is_reference("dense") && !peers.is_reference("good"));
    assert!(peers.is_deterministic("good") && !peers.is_deterministic("bad"));
    assert_eq!(peers.versions().as_deref(), Some("torch 9.9"));
    let prepared = peers.prepare(&case(), "good").unwrap();
    assert_eq!(prepared, Prepared { verified: true, rel_err: Some(0.001), settings: "s".into() });
    let window = peers.window("good", 10.0).unwrap();
    assert_eq!((window.us, window.replays), (5.5, 9));
}

#[test]
fn selections_and_absent_competitors() {
    let absent = |names: &[&str], why: &str| {
        (names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>(), why.to_owned())
    };
    let expected = [absent(&["a", "b"], "no x"), absent(&["c"], "no y")];
    assert_eq!(start("", "auto").absent(), expected);
    assert_eq!(start("", "goo, c").absent(), expected[1..]);
    assert_eq!(start("", "goo,dens").of("attention_fwd"), ["good"]);
    assert_eq!(start("", "goo,typo").unknown(), ["typo"]);
    let none = start("", "none");
    assert!(none.of("attention_fwd").is_empty() && none.absent().is_empty());
    let program = "/nonexistent/python3";
    let command = Command { program: program.into(), arguments: vec![], verbose: false };
    let nobody = Peers::start(command, Selection::Auto, 0);
    assert!(nobody.absent()[0].1.contains("cannot start /nonexistent/python3"), "{nobody:?}");
    assert!(nobody.of("attention_fwd").is_empty());
}

#[test]
fn errors_of_a_competitor_leave_the_server_alive_and_fatal_ones_restart_it() {
    for (answer, lost) in
        [(r#"{"error":"no"}'"#, false), (r#"{"error":"no","fatal":"context"}'; exit 1"#, true)]
    {
        let mut peers = start(&format!("*prepare*bad*) echo '{answer};; {PREPARED}"), "auto");
        let failure = peers.prepare(&case(), "bad").unwrap_err();
        assert_eq!(failure, Failure { message: "no".into(), lost });
        assert!(peers.prepare(&case(), "good").is_ok());
    }
}

#[test]
fn a_competitor_that_kills_the_server_costs_only_itself() {
    let die = r#"*window*bad*) echo gone >&2; exit 3;;"#;
    let mut peers = start(&format!("{die} {PREPARED} {WINDOWED}"), "auto");
    peers.prepare(&case(), "bad").unwrap();
    peers.prepare(&case(), "good").unwrap();
    // Objects are printed with sorted keys, so `op` comes before `peer`.
    let failure = peers.window("bad", 1.0).unwrap_err();
    assert!(failure.lost && failure.message.contains("gone"), "{failure}");
    assert!(failure.message.contains('3'), "{failure}");
    assert_eq!(peers.prepared, ["good"]);
    assert_eq!(peers.window("good", 1.0).unwrap().us, 5.5);
}

#[test]
fn a_hang_is_killed() {
    let mut server = Server::start(&fake("*hang*) exec sleep 600;;")).unwrap();
    let failure = server.ask(&json!({"op": "hang"}), Duration::from_millis(200)).unwrap_err();
    assert!(failure.lost && failure.message.contains("no answer"), "{failure}");
}

#[test]
fn the_real_server_speaks_the_protocol() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/peers/serve.py");
    let arguments = [script, "--device", "cpu"].map(Into::into).to_vec();
    let command = Command { program: "python3".into(), arguments, verbose: false };
    let peers = Peers::start(command, Selection::Auto, 0);
    // Python, torch, both or none may be here; in every case each competitor is there or absent
    // with a reason.
    let absent = peers.absent();
    let counted = absent.iter().map(|(names, _)| names.len()).sum::<usize>();
    let ops = [
        "attention_fwd",
        "attention_e4m3",
        "attention_packed",
        "block_sparse_fwd",
        "attention_bwd",
        "block_sparse_bwd",
        "attention_index",
        "attention_index_shared",
        "attention_index_latent",
        "index_choice",
        "index_choice_weighted",
        "bsr_matmul",
    ];
    // The two modes of one competitor compute the backward pass with and without a block mask.
    let here: BTreeSet<_> = ops.iter().flat_map(|op| peers.of(op)).collect();
    let nobody = absent.iter().any(|(names, _)| names == &[EVERYTHING]);
    assert!(nobody || counted + here.len() == 45, "{absent:?} {here:?}");
    let references = ["torch_matmul_dense", "torch_matmul_random"];
    assert!(nobody || references.iter().all(|reference| peers.is_reference(reference)));
    assert!(!peers.is_reference("torch_triton_bsr"));
}

#[test]
fn a_case_carries_its_shape_and_packed_sequences_never_become_a_dense_case() {
    let value = serde_json::to_value(case()).unwrap();
    let fields = ["op", "mask", "dtype", "seed"].map(|field| value[field].clone());
    assert_eq!(fields, [json!("attention_fwd"), json!("full"), json!("bf16"), json!(3)]);
    let refusal = |id| of(id).unwrap_err().to_string();
    assert_eq!(refusal("mask_s128_h4_b64_top3"), "ours only");
    assert_eq!(refusal("bwd_varlen9+4_h2_d16_full_bf16"), "dense batches only");
    let packed = serde_json::to_value(of("varlen9+4_h2_d16_full_bf16").unwrap()).unwrap();
    assert_eq!((&packed["op"], &packed["lengths"]), (&json!("attention_packed"), &json!([9, 4])));
    let unequal = serde_json::to_value(of("bwd_b1_s8_h1_d24v16_full_bf16").unwrap()).unwrap();
    assert_eq!([&unequal["head_dim"], &unequal["head_dim_v"]], [&json!(24), &json!(16)]);
    assert!(value.get("head_dim_v").is_none());
    assert_eq!(refusal("varlen9+4_h2_d24v16_full_bf16"), "one head_dim only");
}
