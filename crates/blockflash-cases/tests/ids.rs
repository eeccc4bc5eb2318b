//! Every id of every committed record is still the id of a case.

use blockflash_cases::case::Case;
use std::collections::BTreeSet;
use std::path::Path;

/// Operations of records that are no cases: probes of the machine.
const OTHER: [&str; 1] = ["ceiling"];

fn lines(folder: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_record = path.extension().is_some_and(|end| end == "jsonl" || end == "ndjson");
        if path.is_dir() {
            lines(&path, found);
        } else if is_record {
            found.extend(std::fs::read_to_string(&path).unwrap().lines().map(str::to_owned));
        }
    }
}

#[test]
fn ids_of_records_are_read_and_written_back() {
    let mut found = Vec::new();
    lines(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/results"), &mut found);
    let mut ids = BTreeSet::new();
    for line in found {
        let record: serde_json::Value = serde_json::from_str(&line).unwrap();
        if let (Some(op), Some(id)) = (record["op"].as_str(), record["case"].as_str())
            && !OTHER.contains(&op)
        {
            ids.insert((op.to_owned(), id.to_owned()));
        }
    }
    assert!(ids.len() > 400, "only {} ids", ids.len());
    for (op, id) in ids {
        let case: Case = id.parse().unwrap_or_else(|problem| panic!("{op}: {problem}"));
        assert_eq!((case.op(), case.to_string()), (op.as_str(), id));
    }
}
