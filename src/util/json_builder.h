#pragma once
// json_builder.h -- what the JSON library's parser reports, one event after the other, into one `Json`.
//
// The library's own builder is quadratic for hostile text: with a callback it searches the parent at the end of
// each object, and without one the members of an object are copied with all that is in them whenever the object
// grows, once per level of nesting. Here an object is made when its last member is known.

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "util/json.h"

namespace ekv {

class JsonBuilder final : public nlohmann::json_sax<Json> {
 public:
  bool null() override { return add(Json()); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return open(true); }
  bool start_array(size_t) override { return open(false); }
  bool key(string_t& name) override;
  bool end_object() override;
  bool end_array() override;
  bool parse_error(size_t position, const std::string& last_token,
                   const nlohmann::json::exception& fault) override;

  Json take() { return std::move(whole_); }
  const std::string& fault() const { return fault_; }  // why an event was refused; may be no UTF-8
  const std::string& field() const { return field_; }  // the member of the whole in which; empty: none

 private:
  using Member = std::pair<std::string, Json>;
  // An object or array whose end has not come.
  struct Open {
    bool is_object = false;
    Json::array_t items;
    std::vector<Member> members;
    std::map<std::string, size_t> places;  // of members; used from kManyMembers on
    int num_keys = 0;                      // equal ones too
    size_t place = 0;                      // of the member whose value comes next
  };
  static size_t place_of(Open& object, std::string& name);
  bool open(bool is_object);
  bool add(Json value);
  bool too_many_members();
  void name_field();

  std::vector<Open> open_;
  Json whole_;
  std::string fault_, field_;
};

}  // namespace ekv
