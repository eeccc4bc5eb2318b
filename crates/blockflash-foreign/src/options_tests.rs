use super::*;
use std::collections::VecDeque;

/// Arguments of a call as a library might have them, and how many were asked for.
#[derive(Default)]
struct Given {
    values: VecDeque<Value>,
    asked: Vec<(&'static str, Kind)>,
}

impl Given {
    fn next(&mut self, name: &'static str, kind: Kind) -> Option<Value> {
        self.asked.push((name, kind));
        self.values.pop_front()
    }
}

impl Arguments for Given {
    type Tensor = i64;
    type Error = Value;

    fn tensor(&mut self, name: &'static str) -> Result<Option<i64>, Value> {
        match self.next(name, Kind::Tensor) {
            None | Some(Value::Missing) => Ok(None),
            Some(Value::Int(number)) => Ok(Some(number)),
            Some(other) => Err(other),
        }
    }

    fn int(&mut self, name: &'static str) -> Result<Option<i64>, Value> {
        match self.next(name, Kind::Int) {
            None => Ok(None),
            Some(Value::Int(number)) => Ok(Some(number)),
            Some(other) => Err(other),
        }
    }

    fn bool(&mut self, name: &'static str) -> Result<Option<bool>, Value> {
        match self.next(name, Kind::Bool) {
            None => Ok(None),
            Some(Value::Bool(truth)) => Ok(Some(truth)),
            Some(other) => Err(other),
        }
    }

    fn float(&mut self, name: &'static str) -> Result<Option<f64>, Value> {
        match self.next(name, Kind::Float) {
            None => Ok(None),
            Some(Value::Float(number)) => Ok(Some(number)),
            Some(other) => Err(other),
        }
    }

    fn optional_float(&mut self, name: &'static str) -> Result<Option<f64>, Value> {
        match self.next(name, Kind::OptionalFloat) {
            None | Some(Value::Missing) => Ok(None),
            Some(Value::Float(number)) => Ok(Some(number)),
            Some(other) => Err(other),
        }
    }
}

/// A number is asked for as such, also where it stands for a length.
fn asked(kind: Kind) -> Kind {
    if kind == Kind::Size { Kind::Int } else { kind }
}

#[test]
fn arguments_are_read_in_the_order_of_the_table() {
    let mut none = Given::default();
    AttentionOptions::read(&mut none).unwrap();
    let table = AttentionOptions::TABLE.iter().map(|of| (of.name, asked(of.kind)));
    assert_eq!(none.asked, table.collect::<Vec<_>>());
    let mut none = Given::default();
    DecodeOptions::read(&mut none).unwrap();
    let table = DecodeOptions::TABLE.iter().map(|of| (of.name, asked(of.kind)));
    assert_eq!(none.asked, table.collect::<Vec<_>>());
}

#[test]
fn what_is_not_given_has_the_default_of_the_table() {
    let absent = AttentionOptions::read(&mut Given::default()).unwrap();
    let values = AttentionOptions::TABLE.iter().map(|argument| argument.default).collect();
    let given = AttentionOptions::read(&mut Given { values, asked: Vec::new() }).unwrap();
    assert_eq!(given.numbers, absent.numbers);
    assert!(<[_; 8]>::from(absent.tensors).iter().all(Option::is_none));
    let absent = DecodeOptions::read(&mut Given::default()).unwrap();
    let values = DecodeOptions::TABLE.iter().map(|argument| argument.default).collect();
    let given = DecodeOptions::read(&mut Given { values, asked: Vec::new() }).unwrap();
    assert_eq!(given.numbers, absent.numbers);
    assert_eq!((absent.numbers.left, absent.numbers.scale), (-1, None));
}

#[test]
fn given_arguments_reach_their_fields() {
    let values = [
        Value::Int(7),
        Value::Missing,
        Value::Int(9),
        Value::Missing,
        Value::Int(8),
        Value::Int(6),
        Value::Missing,
        Value::Int(5),
        Value::Int(1),
        Value::Int(2),
        Value::Int(3),
        Value::Int(4),
        Value::Bool(true),
        Value::Float(0.5),
        Value::Float(30.0),
        Value::Int(5),
        Value::Int(3),
    ];
    let mut given = Given { values: values.into(), asked: Vec::new() };
    let AttentionOptions { tensors, numbers } = AttentionOptions::read(&mut given).unwrap();
    let named = tensors.try_map(|name, number| Ok::<_, ()>((name, number))).unwrap();
    assert_eq!(
        <[_; 8]>::from(named),
        [
            ("sink", Some(7)),
            ("cu_seqlens_q", None),
            ("cu_seqlens_k", Some(9)),
            ("bias", None),
            ("alibi_slopes", Some(8)),
            ("q_scale", Some(6)),
            ("k_scale", None),
            ("v_scale", Some(5)),
        ]
    );
    let expected = AttentionNumbers {
        max_q: 1,
        max_k: 2,
        left: 3,
        right: 4,
        top_left: true,
        scale: Some(0.5),
        softcap: 30.0,
        block_mask: 5,
        out_dtype: 3,
    };
    assert_eq!(numbers, expected);
    let mut wrong = Given { values: [Value::Bool(true)].into(), asked: Vec::new() };
    assert_eq!(AttentionOptions::read(&mut wrong).unwrap_err(), Value::Bool(true));
}
