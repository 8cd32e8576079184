#include "util/json_builder.h"

#include <fmt/format.h>

#include <algorithm>

namespace ekv {
namespace {

constexpr size_t kManyMembers = 16;  // up to here comparing with each is faster than a tree

}  // namespace

bool JsonBuilder::open(bool is_object) {
  open_.emplace_back().is_object = is_object;
  return true;
}

bool JsonBuilder::add(Json value) {
  if (open_.empty())
    whole_ = std::move(value);
  else if (Open& parent = open_.back(); parent.is_object)
    parent.members[parent.place].second = std::move(value);
  else
    parent.items.push_back(std::move(value));
  return true;
}

// Of equal keys the first has the place and the last the value, as in the library.
size_t JsonBuilder::place_of(Open& object, std::string& name) {
  const size_t end = object.members.size();
  if (end < kManyMembers) {
    const auto known = std::find_if(object.members.begin(), object.members.end(),
                                    [&](const Member& member) { return member.first == name; });
    if (known != object.members.end()) return size_t(known - object.members.begin());
  } else {
    if (object.places.empty())
      for (size_t i = 0; i < end; ++i) object.places.emplace(object.members[i].first, i);
    const auto [known, is_new] = object.places.emplace(name, end);
    if (!is_new) return known->second;
  }
  object.members.emplace_back(std::move(name), Json());
  return end;
}

bool JsonBuilder::key(string_t& name) {
  Open& object = open_.back();
  if (++object.num_keys > kMaxJsonMembers) return too_many_members();
  object.place = place_of(object, name);
  return true;
}

// The member of the whole that is being read.
void JsonBuilder::name_field() {
  const Open& whole = open_.front();
  if (!whole.is_object || whole.members.empty()) return;
  const std::string& name = whole.members[whole.place].first;
  if (name.size() <= kMostNameBytes) field_ = name;
}

bool JsonBuilder::too_many_members() {
  if (open_.size() > 1) name_field();
  const char* holds = open_.size() == 2 ? "has" : "holds an object with";
  fault_ = field_.empty() ? fmt::format("a JSON object has more than {0} members; at most {0} are allowed",
                                        kMaxJsonMembers)
                          : fmt::format("'{0}' {1} more than {2} members; at most {2} are allowed", field_,
                                        holds, kMaxJsonMembers);
  return false;
}

bool JsonBuilder::end_object() {
  Json object = Json::object();
  // Through the base class: the map's own insertion searches for equal keys again.
  auto& members = static_cast<Json::object_t::Container&>(object.get_ref<Json::object_t&>());
  members.reserve(open_.back().members.size());
  for (Member& member : open_.back().members)
    members.emplace_back(std::move(member.first), std::move(member.second));
  open_.pop_back();
  return add(std::move(object));
}

bool JsonBuilder::end_array() {
  Json array(std::move(open_.back().items));
  open_.pop_back();
  return add(std::move(array));
}

bool JsonBuilder::parse_error(size_t, const std::string&, const nlohmann::json::exception& fault) {
  // A number beyond the largest double is the one error that is not of the text, so that its member is known.
  if (dynamic_cast<const nlohmann::json::out_of_range*>(&fault) && !open_.empty()) name_field();
  fault_ = field_.empty() ? fmt::format("not valid JSON: {}", fault.what())
                          : fmt::format("'{}' holds a number that is out of range: {}", field_, fault.what());
  return false;
}

}  // namespace ekv
